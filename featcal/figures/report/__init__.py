"""Write reports of a suite: one file of HTML that asks nobody for anything, or Markdown with its figures as SVG."""
