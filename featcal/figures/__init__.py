"""What is shown of results, wherever it is shown: tables, plotly figures, explanations. No streamlit, no torch."""
