"""Turn results into tables, plotly figures and explanations, for every interface. This room uses neither streamlit nor
torch."""
