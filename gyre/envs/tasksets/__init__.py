"""Procedural task families."""
