import pytest
import torch

from hybridpipe.comm.messages import (
    ALIGNMENT,
    HEADER_BYTES,
    SPEC_BYTES,
    ProtocolError,
    Spec,
    TensorSpec,
    check_header,
    decode_spec,
    encode_spec,
    pack,
    spec_of,
    views,
)

HEADER, NAMES = (1, 20, 3, 0), ("kind", "step", "microbatch", "stage")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)


def any_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return random bits, including NaNs with a payload; a bool holds only 0 and 1."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (num_bytes,), dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def tensor_spec(shape, dtype, requires_grad=False, sent=None) -> TensorSpec:
    return TensorSpec(shape, dtype, requires_grad, sent or dtype)


def sent(tensors) -> tuple[torch.Tensor, ...]:
    """Return tensors packed into a message and unpacked again."""
    spec = spec_of(tensors)
    buffer = torch.full((spec.num_bytes,), 170, dtype=torch.uint8)
    pack(buffer, spec, tensors, HEADER)
    arrived = buffer.clone()
    check_header(arrived, spec, HEADER, NAMES)
    return views(arrived, spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (2, 0, 3)])
def test_a_tensor_arrives_bit_for_bit(shape, dtype):
    tensor = any_bits(shape, dtype)
    (arrived,) = sent([tensor])
    assert arrived.shape == tensor.shape and arrived.dtype == dtype
    assert bits(arrived) == bits(tensor)


def test_a_tuple_of_everything_arrives_aligned():
    tensors = [any_bits((3, 1 + i), dtype) for i, dtype in enumerate(DTYPES)] + [any_bits((0, 4), torch.half)]
    arrived = sent(tensors)
    assert [bits(a) for a in arrived] == [bits(t) for t in tensors]
    assert [a.dtype for a in arrived] == [t.dtype for t in tensors]
    assert all(a.data_ptr() % ALIGNMENT == 0 for a in arrived if a.numel())


def test_an_empty_tuple_is_a_header():
    assert sent([]) == ()
    assert Spec(()).num_bytes == HEADER_BYTES


@pytest.mark.parametrize(
    "strided",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[1:, 1:],
        lambda t: t[:1].expand(4, 6),
        lambda t: t.view(2, 2, 6).permute(2, 0, 1),
        lambda t: t.view(1, 2, 2, 6).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "every other", "slice", "expanded", "permuted", "channels last"],
)
def test_memory_layout_does_not_matter(strided):
    tensor = strided(torch.randn(4, 6))
    (arrived,) = sent([tensor])
    assert torch.equal(arrived, tensor) and arrived.is_contiguous()


def test_what_requires_grad_is_sent_without_its_graph():
    tensor = torch.randn(3, requires_grad=True) * 2
    (arrived,) = sent([tensor])
    assert not arrived.requires_grad and torch.equal(arrived, tensor.detach())


def test_packing_does_not_keep_the_graph():
    spec = spec_of([tensor := torch.randn(3, requires_grad=True)])
    pack(buffer := torch.empty(spec.num_bytes, dtype=torch.uint8), spec, [tensor], HEADER)
    assert not buffer.requires_grad


@pytest.mark.parametrize(
    "header, told",
    [
        ((1, 21, 3, 0), "step 20 instead of 21$"),
        ((0, 20, 3, 0), "kind 1 instead of 0$"),
        ((1, 20, 4, 2), "microbatch 3 instead of 4, stage 0 instead of 2$"),
    ],
)
def test_the_header_names_what_differs(header, told):
    spec = spec_of([torch.ones(3)])
    pack(buffer := torch.empty(spec.num_bytes, dtype=torch.uint8), spec, [torch.ones(3)], HEADER)
    with pytest.raises(ProtocolError, match=told):
        check_header(buffer, spec, header, NAMES)


def test_another_size_is_told():
    spec = spec_of([torch.ones(3)])
    pack(buffer := torch.empty(spec.num_bytes, dtype=torch.uint8), spec, [torch.ones(3)], HEADER)
    with pytest.raises(ProtocolError, match="num_bytes 128 instead of 192"):
        check_header(buffer, spec_of([torch.ones(30)]), HEADER, NAMES)


def test_foreign_bytes_are_told():
    with pytest.raises(ProtocolError, match="does not start with hybridpipe"):
        check_header(torch.zeros(HEADER_BYTES, dtype=torch.uint8), Spec(()), HEADER, NAMES)


SPECS = [
    Spec((), single=False),
    Spec((tensor_spec((), torch.float32, True),), single=True),
    Spec((tensor_spec((2, 0, 3), torch.bool), tensor_spec((7,), torch.bfloat16, True)), single=False),
    Spec((tensor_spec((3,), torch.float32, True, torch.bfloat16), tensor_spec((3,), torch.int64))),
    Spec(tuple(tensor_spec((i,), dtype, dtype.is_floating_point) for i, dtype in enumerate(DTYPES))),
]


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_survives_its_encoding(spec):
    encoded = encode_spec(spec)
    assert encoded.dtype == torch.uint8 and len(encoded) == SPEC_BYTES
    assert decode_spec(encoded.clone()) == spec


def test_what_cannot_be_described_is_refused():
    spec = Spec((tensor_spec((1, 2, 3, 4), torch.float32, True),) * 200)
    with pytest.raises(ValueError, match=r"must fit in 4096 bytes, got \d+ bytes for 200 tensors"):
        encode_spec(spec)


def test_a_tensor_may_travel_in_half_its_bytes():
    tensors = [torch.tensor([1.0, 1 / 3, 1e30], requires_grad=True), torch.tensor([7])]
    spec = spec_of(tensors, sent=lambda each: torch.bfloat16 if each.requires_grad else each.dtype)
    buffer = torch.empty(spec.num_bytes, dtype=torch.uint8)
    pack(buffer, spec, tensors, HEADER)
    values, integers = views(buffer, spec)
    assert spec.tensors[0].num_bytes == 6 and spec.tensors[0].dtype == torch.float32
    assert torch.equal(values, tensors[0].detach().bfloat16()) and torch.equal(integers, tensors[1])
    assert spec.gradients.tensors[1] == spec.tensors[0]


def test_gradients_come_back_for_what_requires_one():
    a, b, c = torch.ones(2, requires_grad=True), torch.ones(3), torch.ones(4, requires_grad=True)
    there, *gradients = spec_of([a, b, c]).gradients.tensors
    assert (there.shape, there.dtype) == ((2,), torch.uint8)
    assert [t.shape for t in gradients] == [(2,), (4,)]
