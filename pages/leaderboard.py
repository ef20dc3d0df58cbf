"""Show what other methods give, at what cost: tables that were measured, and beside them those of the paper."""

import streamlit as st

from app import leaderboard

st.title("What do methods give, and what do they need?")
leaderboard.show()
