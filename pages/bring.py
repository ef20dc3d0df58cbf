"""Bring one's own models and data: fields or an uploaded file, checked while they are filled in, to a suite file."""

import streamlit as st

from app import bring

st.title("Bring your own models")
st.caption(
    "A suite names a base, a merged model or how to merge, one expert per task and where samples lie. What is "
    "made here is a file that the command line takes as well. Relative paths start from its folder."
)
started, uploaded = st.tabs(["Fill in", "Upload a file"])
with started:
    bring.form()
with uploaded:
    bring.upload()
text = bring.suite_text()
file = bring.place(text) if text else None
if file is not None:
    st.header("Does it fit together?")
    suite = bring.verdict(text, file)
    if suite is not None:
        st.header("Take it into use")
        bring.write(text, file)
