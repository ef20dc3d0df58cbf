"""One's own models and data: fields or an uploaded file, checked while they are filled in, to a suite file."""

import streamlit as st

from app import bring

st.header("Bring your own models")
st.caption(
    "A suite names a base, a merged model or how to merge, one expert per task and where samples lie. What is "
    "made here is a file that the command line takes as well. Relative paths start where the app was "
    "started."
)
started, uploaded = st.tabs(["Fill in", "Upload a file"])
with started:
    bring.form()
with uploaded:
    bring.upload()
text = bring.suite_text()
if text:
    st.subheader("Does it fit together?")
    suite = bring.verdict(text)
    if suite is not None:
        st.subheader("Take it into use")
        bring.write(text, suite)
