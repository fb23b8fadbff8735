"""What passes between stages: every nest goes into one tensor and comes out again, with its structure and gradient paths."""

import json

import pytest
import torch

from recycle.core.errors import UserError
from recycle.runtime.boundary.boundary_spec import BoundarySpec, PackedTensors, TensorSpec
from recycle.runtime.boundary.nests import map_tensors, num_samples_in, tensors_in, unsendable_part

HIDDEN = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
NESTS = {
    "one tensor": HIDDEN,
    "a pair": (HIDDEN, torch.arange(6).view(2, 3)),
    "a dict": {"hidden": HIDDEN, "mask": torch.tensor([[True, False, True], [True, True, True]]), "positions": torch.arange(3)},
    "parts in parts": {"states": [HIDDEN, (HIDDEN.double(), None)], "scale": 0.5, "name": "x", "is_causal": True},
    "dtypes of all sizes": [torch.ones(3, dtype=dtype) for dtype in (torch.int8, torch.bfloat16, torch.float32, torch.int64)],
    "an empty tensor and a number": (torch.zeros(0, 4), torch.tensor(3.0)),
}


def same(one, other):
    """Whether two nests have the same structure and the same tensors."""
    pairs = list(zip(tensors_in(one), tensors_in(other), strict=True))
    return BoundarySpec.of(one) == BoundarySpec.of(other) and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_a_nest_travels_as_one_tensor_and_comes_out_as_it_was(nest):
    spec = BoundarySpec.of(nest)
    body = spec.forwards.pack(list(tensors_in(nest)), torch.device("cpu"))
    assert TensorSpec.of(body) == spec.forwards.spec
    assert same(spec.nest_of(spec.forwards.unpack(body.clone())), nest)


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_a_spec_is_the_same_after_json(nest):
    spec = BoundarySpec.of(nest)
    assert BoundarySpec.parse(json.loads(json.dumps(spec.to_json()))) == spec


def test_one_tensor_travels_as_it_is():
    spec = BoundarySpec.of(HIDDEN)
    assert spec.forwards.pack([HIDDEN], HIDDEN.device) is HIDDEN
    assert spec.forwards.spec == spec.backwards.spec == TensorSpec((2, 3, 5), torch.float32)


def test_only_tensors_with_a_gradient_path_have_a_gradient_and_require_one():
    made = {"hidden": HIDDEN.clone().requires_grad_(), "bias": torch.zeros(3), "ids": torch.arange(3)}
    spec = BoundarySpec.of(made)
    assert spec.has_gradient == (True, False, False)
    assert spec.backwards.tensors == (TensorSpec((2, 3, 5), torch.float32),)
    received = spec.nest_of([tensor.detach().clone() for tensor in tensors_in(made)])
    assert [tensor.requires_grad for tensor in tensors_in(received)] == [True, False, False]


def test_tensors_of_a_message_are_aligned_and_are_no_views():
    packed = PackedTensors([TensorSpec((3,), torch.int8), TensorSpec((2, 2), torch.float64), TensorSpec((5,), torch.float32)])
    parts = packed.unpack(torch.zeros(packed.spec.shape, dtype=torch.uint8))
    assert all((part.data_ptr() - parts[0].data_ptr()) % 256 == 0 for part in parts)
    assert all(part.is_contiguous() and not part._is_view() for part in parts)


def test_nothing_is_sent_as_a_tensor_that_is_not_empty():
    assert PackedTensors([]).spec.size_bytes > 0


@pytest.mark.parametrize(
    ("nest", "found"),
    [(HIDDEN, None), ((HIDDEN, None, 3), None), ({"a": object()}, "object"), ([{1: HIDDEN}], "dict whose keys")],
)
def test_a_leaf_that_cannot_be_sent_is_named(nest, found):
    assert unsendable_part(nest) is None if found is None else unsendable_part(nest).startswith(found)


def test_the_samples_of_a_nest_are_those_of_its_first_tensor():
    assert num_samples_in({"scale": 2.0, "all": torch.tensor(1.0), "ids": torch.zeros(7, 3)}) == 7
    doubled = map_tensors(lambda tensor: 2 * tensor, {"a": (torch.ones(1), "x")})
    assert doubled["a"][0].item() == 2
    assert doubled["a"][1] == "x"


@pytest.mark.parametrize(
    "changed",
    [
        {"tensors": [[[2], "save"], [[2], "int64"]]},
        {"tensors": [[[2], "float32"]]},
        {"structure": ["tuple", ["tensor"]]},
        {"structure": ["tuple", ["tensor"], ["file"], ["tensor"]], "gradients": [True, 0, 0]},
        {"gradients": None},
    ],
)
def test_a_spec_that_was_changed_on_its_way_is_refused(changed):
    spec = BoundarySpec.of((torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.int64)))
    form = json.loads(json.dumps(spec.to_json()))
    assert BoundarySpec.parse(form) == spec
    with pytest.raises(UserError, match="give all machines the same release"):
        BoundarySpec.parse(form | changed)
