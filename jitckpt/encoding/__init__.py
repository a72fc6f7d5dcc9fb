"""State as bytes: trees, tensors, files of tensors."""
