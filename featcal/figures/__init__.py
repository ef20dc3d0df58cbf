"""Show results, wherever they are shown: tables, plotly figures, explanations. No streamlit, no torch."""
