import pytest
import torch

from hybridpipe.comm.messages import (
    ALIGNMENT,
    HEADER_BYTES,
    SPEC_BYTES,
    ProtocolError,
    Spec,
    TensorSpec,
    decode_spec,
    encode_spec,
    pack,
    present,
    spec_of,
    views,
    write_head,
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


def packed(spec: Spec, tensors) -> torch.Tensor:
    """Return a message in memory that held something else."""
    buffer = torch.full((spec.num_bytes,), 170, dtype=torch.uint8)
    write_head(buffer, spec, tensors, HEADER)
    pack(buffer, spec, tensors)
    return buffer


def sent(tensors) -> tuple[torch.Tensor, ...]:
    """Return tensors packed into a message and unpacked again."""
    spec = spec_of(tensors)
    arrived = packed(spec, tensors).clone()
    present(arrived, spec, HEADER, NAMES)
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
    buffer = packed(spec, [tensor])
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
    buffer = packed(spec, [torch.ones(3)])
    with pytest.raises(ProtocolError, match=told):
        present(buffer, spec, header, NAMES)


def test_another_size_is_told():
    spec = spec_of([torch.ones(3)])
    buffer = packed(spec, [torch.ones(3)])
    with pytest.raises(ProtocolError, match="num_bytes 128 instead of 192"):
        present(buffer, spec_of([torch.ones(30)]), HEADER, NAMES)


def test_foreign_bytes_are_told():
    with pytest.raises(ProtocolError, match="does not start with hybridpipe"):
        present(torch.zeros(HEADER_BYTES, dtype=torch.uint8), Spec(()), HEADER, NAMES)


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
    buffer = packed(spec, tensors)
    values, integers = views(buffer, spec)
    assert spec.tensors[0].num_bytes == 6 and spec.tensors[0].dtype == torch.float32
    assert torch.equal(values, tensors[0].detach().bfloat16()) and torch.equal(integers, tensors[1])
    assert spec.gradients.tensors == spec.tensors[:1]


def test_gradients_come_back_for_what_requires_one():
    a, b, c = torch.ones(2, requires_grad=True), torch.ones(3), torch.ones(4, requires_grad=True)
    spec = spec_of([a, b, c]).gradients
    assert [t.shape for t in spec.tensors] == [(2,), (4,)]
    for gradients in ([None, c], [a, None], [a, c], [None, None]):
        assert present(packed(spec, gradients), spec, HEADER, NAMES) == [
            each is not None for each in gradients
        ]


@pytest.mark.parametrize("count, num_bytes", [(0, 64), (1, 128), (64, 128), (65, 192)])
def test_a_head_has_a_byte_for_each_gradient(count, num_bytes):
    spec = Spec((tensor_spec((3,), torch.float32, True),) * count).gradients
    assert spec.head_bytes == num_bytes and spec.num_bytes == num_bytes + 64 * count
    values = [torch.full((3,), float(i)) if i % 3 else None for i in range(count)]
    message = packed(spec, values)
    assert present(message[:num_bytes], spec, HEADER, NAMES) == [value is not None for value in values]
    assert all(torch.equal(a, b) for a, b in zip(views(message, spec), values, strict=True) if b is not None)
