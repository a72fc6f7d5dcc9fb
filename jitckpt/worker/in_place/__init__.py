"""Transparent mode in a worker: minibatches that can be made again."""
