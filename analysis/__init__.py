"""Tensors in, frozen results out; silent."""
