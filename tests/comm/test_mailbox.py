"""Slots of a mailbox, and notes about them."""

import pytest
import torch

from hybridpipe.comm import mailbox
from hybridpipe.comm.mailbox import MOST_SLOTS, NO_SLOT, NOTE_BYTES, Mailbox, ReadSlot, read_note, write_note
from hybridpipe.comm.messages import spec_of, views
from tests.late_cuda import LateLanes


def write(box: Mailbox, *numbers: float) -> int:
    """Write a message into a free slot, and return its number."""
    tensor = torch.tensor(numbers, dtype=torch.float32)
    spec = spec_of([tensor])
    number = box.free_slot(spec.num_bytes)
    box.slots[number].write(spec, [tensor])
    return number


def read(lanes: LateLanes, slot: ReadSlot, handle: bytes, count: int) -> list[float]:
    spec = spec_of([torch.zeros(count)])
    room, copied = slot.read(handle, spec.num_bytes)
    return views(lanes.copied_in(room, [copied]), spec)[0].tolist()


def test_a_slot_serves_again_when_it_was_read_and_then_there_is_one():
    lanes, reader = LateLanes(), LateLanes()
    box, slot = Mailbox(lanes), ReadSlot(reader)
    for turn in range(3):
        with lanes.cuda:
            number = write(box, turn, turn + 1)
        with reader.cuda:
            assert read(reader, slot, box.slots[number].handle, 2) == [turn, turn + 1]
        box.slots[number].free(slot.handle)
    assert len(box.slots) == 1


def test_without_a_note_each_message_has_a_slot_and_then_none_is_free():
    lanes = LateLanes()
    box = Mailbox(lanes)
    with lanes.cuda:
        assert [write(box, 1.0) for _ in range(MOST_SLOTS)] == list(range(MOST_SLOTS))
    assert box.free_slot(64) == NO_SLOT


def test_a_slot_that_is_too_small_grows_and_is_opened_again(monkeypatch):
    monkeypatch.setattr(mailbox, "MOST_SLOTS", 1)
    lanes, reader = LateLanes(), LateLanes()
    box, slot, handles = Mailbox(lanes), ReadSlot(reader), set()
    for count in (3, 400, 3, 400):
        with lanes.cuda:
            write(box, *range(count))
        handles.add(box.slots[0].handle)
        with reader.cuda:
            assert read(reader, slot, box.slots[0].handle, count) == list(range(count))
        box.slots[0].free(slot.handle)
    assert len(handles) == 2


def test_a_note_tells_a_slot_and_a_handle():
    note = torch.empty(NOTE_BYTES, dtype=torch.uint8)
    for number, handle in [(3, b"handle"), (NO_SLOT, b""), (0, bytes(NOTE_BYTES - 16))]:
        write_note(note, number, handle)
        assert read_note(note) == (number, handle)
    with pytest.raises(RuntimeError, match="a handle has 2033 bytes, and 2032 fit"):
        write_note(note, 0, bytes(NOTE_BYTES - 15))
