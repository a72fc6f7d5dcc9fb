"""Trains by each recipe of a JSON list on the CPU and on softgpu; prints which tensors differ, as JSON."""

import json
import sys
from importlib import import_module
from unittest import mock

import torch
from models import Recipe, train


def different_tensors(recipe: Recipe) -> list[str]:
    expected, actual = train(recipe, "cpu"), train(recipe, "cuda")
    assert expected.keys() == actual.keys()
    assert all(torch.isfinite(tensor).all() for tensor in actual.values())
    return [name for name in expected if not torch.equal(expected[name], actual[name])]


# torch has no capturable optimizer on the CPU, though the CPU has all that one is made of.
adam = import_module("torch.optim.adam")
with mock.patch.object(adam, "_get_capturable_supported_devices", return_value=["cpu", "cuda"]):
    found = [different_tensors(Recipe(**recipe)) for recipe in json.loads(sys.argv[1])]
print(json.dumps(found))
