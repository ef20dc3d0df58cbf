"""Show long work: what is running and in line, how far it is, how it ended."""

import streamlit as st

from app import jobs

st.title("What is being computed?")
st.caption(
    "Work that takes longer than a moment runs in processes of its own, one at a time, and visitors take turns. It "
    "goes on when this page is closed or the app is stopped. A result is found again wherever the same is asked for."
)
jobs.listing()
