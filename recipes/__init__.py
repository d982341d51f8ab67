"""Recipes: one file a run."""
