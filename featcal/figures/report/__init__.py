"""Write reports of a suite: one self-contained HTML file, or Markdown with its figures as SVG."""
