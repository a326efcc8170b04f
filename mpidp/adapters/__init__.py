"""Adapters: one module for each autograd framework, imported only by those who use it."""
