"""Measurements of methods: what collectives cost, and what gradients lose."""
