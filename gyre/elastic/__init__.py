"""Decisions: who serves, who trains, which group is consumed when; all pure."""
