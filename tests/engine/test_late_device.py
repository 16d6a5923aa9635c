"""The executor over a stand-in for a GPU whose copies come late: what is not waited for is wrong."""

import gc
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from hybridpipe import device as devices
from hybridpipe.comm import courier, mailbox
from hybridpipe.device import Point
from tests.engine.helpers import assert_same, in_threads, make_plan, one_process
from tests.engine.test_executor import branches, minibatches, mlp, skip
from tests.late_cuda import LateLanes
from tests.thinned import thinned

momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
train = {"loss": nn.functional.cross_entropy, "optimizer": momentum}
PLANS = [
    ("1-1", "gpipe"),
    ("1-1-1", "1f1b"),
    ("2-1", "1f1b"),
    ("1-2-1", "1f1b"),
    ("1-1", "interleaved-1f1b"),
    ("1-1-1", "zero-bubble"),
]


def trained_late(plan, model, data, way="staged"):
    """Train over late lanes; return the result, and the mistakes that these have noticed."""
    lanes = {rank: LateLanes() for rank in plan.ranks}
    done = in_threads(plan, model, data, 2, **train, lanes=lanes, way=way)
    gc.collect()
    for each in lanes.values():
        for stream in (each.cuda.computing, each._outward, each._inward):
            stream.synchronize()
    return done, [mistake for each in lanes.values() for mistake in each.cuda.mistakes]


@pytest.mark.parametrize(
    "named, model, way", thinned(PLANS, [mlp, skip, branches], ["staged", "direct", "ipc"])
)
def test_late_copies_change_nothing(named, model, way):
    torch.manual_seed(0)
    name, schedule = named
    options = {"chunks": 2} if schedule == "interleaved-1f1b" else {}
    net = model()
    plan = make_plan(name, len(net), 4, schedule, **options)
    data = minibatches(8, 8, 7)
    done, mistakes = trained_late(plan, net, data, way)
    assert_same(done, one_process(net, data, **train))
    assert mistakes == []


@pytest.mark.parametrize("way", ["staged", "ipc"])
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_late_copies_change_nothing_of_an_asynchronous_schedule(schedule, way):
    torch.manual_seed(0)
    net, data = mlp(), minibatches(*[8] * 6)
    plan = make_plan("1-1-1", 5, 1 if schedule == "pipedream" else 2, schedule)
    size = 8 if schedule == "pipedream" else 4
    expected = in_threads(plan, net, data, size, **train)
    lanes = {rank: LateLanes() for rank in plan.ranks}
    done = in_threads(plan, net, data, size, **train, lanes=lanes, way=way)
    assert done.losses == expected.losses


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("name, schedule", [("1-1-1", "gpipe"), ("2-1", "1f1b"), ("1-1-1", "zero-bubble")])
def test_messages_that_find_no_slot_are_staged(monkeypatch, name, schedule, most):
    monkeypatch.setattr(mailbox, "MOST_SLOTS", most)
    torch.manual_seed(0)
    net, plan, data = mlp(), make_plan(name, 5, 8, schedule), minibatches(16, 16, 13)
    staged, send = [], courier.StagingCourier.send
    monkeypatch.setattr(courier.StagingCourier, "send", lambda *each: (staged.append(each[-1]), send(*each)))
    done, mistakes = trained_late(plan, net, data, "ipc")
    assert_same(done, one_process(net, data, **train))
    assert mistakes == [] and staged


def test_a_few_slots_do_and_grow_with_their_messages(monkeypatch):
    """Microbatches of 1, 2 and 3 samples, the largest last."""
    mailboxes, make = [], mailbox.Mailbox.__init__

    def kept(self, lanes):
        make(self, lanes)
        mailboxes.append(self)

    monkeypatch.setattr(mailbox.Mailbox, "__init__", kept)
    torch.manual_seed(0)
    net, plan, data = mlp(), make_plan("1-1-1", 5, 8), minibatches(9, 16, 17, 24)
    lanes = {rank: LateLanes() for rank in plan.ranks}
    done = in_threads(plan, net, data, 3, **train, lanes=lanes, way="ipc")
    assert_same(done, one_process(net, data, **train))
    assert 0 < max(len(each.slots) for each in mailboxes) <= mailbox.MOST_SLOTS


def test_events_are_those_of_the_program_in_order():
    torch.manual_seed(0)
    plan = make_plan("1-1", 5, 4)
    data = minibatches(8, 8)
    done, _ = trained_late(plan, mlp(), data)
    expected = in_threads(plan, mlp(), data, 2, **train)
    for rank, updates in done.events.items():
        for events, others in zip(updates, expected.events[rank], strict=True):
            assert [each.instruction for each in events] == [each.instruction for each in others]
            assert all(a.end_seconds == b.start_seconds for a, b in pairwise(events))
            assert all(each.seconds >= 0 for each in events)


class Sent:
    """An event that has come already."""

    def query(self):
        return True


class Broken:
    """Breaks one of the waits, and tells which."""

    @staticmethod
    def send_does_not_wait(monkeypatch):
        """A message is sent before it was copied."""
        send = courier.StagingCourier.send

        def at_once(self, *arguments):
            copy_out = self.lanes.copy_out
            monkeypatch.setattr(self.lanes, "copy_out", lambda *each: [Sent()] * len(copy_out(*each)))
            send(self, *arguments)

        monkeypatch.setattr(courier.StagingCourier, "send", at_once)

    @staticmethod
    def copy_does_not_wait_for_computing(monkeypatch):
        """A message is copied before it was computed."""

        def copy_out(self, hosts, tensors):
            with self._cuda.stream(self._outward):
                return [self._copied(*each, each[1]) for each in zip(hosts, tensors, strict=True)]

        monkeypatch.setattr(devices.GpuLanes, "copy_out", copy_out)

    @staticmethod
    def message_is_let_go(monkeypatch):
        """Memory on the device is free before it was copied."""
        monkeypatch.setattr(devices, "Point", lambda event, held: Point(event, ()))

    @staticmethod
    def computing_does_not_wait(monkeypatch):
        """Layers read what has not arrived."""

        monkeypatch.setattr(devices.GpuLanes, "copied_in", lambda self, tensor, copied: self.used(tensor))

    @staticmethod
    def arrived_is_not_held(monkeypatch):
        """Pinned memory is received into before it was copied."""
        copied_in = devices.GpuLanes.copied_in

        def forget(self, tensor, copied):
            tensor = copied_in(self, tensor, copied)
            self._arriving.clear()
            copied.clear()
            return tensor

        monkeypatch.setattr(devices.GpuLanes, "copied_in", forget)

    @staticmethod
    def use_is_not_recorded(monkeypatch):
        """The stream for copies gets memory back while layers use it."""
        monkeypatch.setattr(LateLanes, "used", lambda self, tensor: tensor)


class BrokenIpc:
    """Breaks one of the waits between two ranks."""

    @staticmethod
    def slot_is_written_before_it_was_read(monkeypatch):
        """The sender's GPU does not wait for the reader's."""
        monkeypatch.setattr(devices.GpuLanes, "wait_for", lambda self, event: None)

    @staticmethod
    def slot_is_free_at_once(monkeypatch):
        """The sender takes a slot again before its reader has given its GPU the copy."""
        write = mailbox.SentSlot.write

        def and_free(self, *arguments):
            write(self, *arguments)
            self.is_free = True

        monkeypatch.setattr(mailbox.SentSlot, "write", and_free)

    @staticmethod
    def slot_is_read_before_it_was_written(monkeypatch):
        """The reader's GPU does not wait for the sender's."""
        copy_from = devices.GpuLanes.copy_from

        def at_once(self, room, memory, written, read):
            return copy_from(self, room, memory, self._cuda.Event(), read)

        monkeypatch.setattr(devices.GpuLanes, "copy_from", at_once)

    @staticmethod
    def read_comes_before_the_copy(monkeypatch):
        """The event for the sender does not wait for the copy."""

        def copy_from(self, room, memory, written, read):
            with self._cuda.stream(self._inward):
                read.record()
                self._inward.wait_event(written)
                return self._copied(room, memory)

        monkeypatch.setattr(devices.GpuLanes, "copy_from", copy_from)

    @staticmethod
    def computing_does_not_wait(monkeypatch):
        """Layers read what was not copied."""
        Broken.computing_does_not_wait(monkeypatch)

    @staticmethod
    def use_is_not_recorded(monkeypatch):
        """The stream for copies gets memory back while layers use it."""
        Broken.use_is_not_recorded(monkeypatch)


BREAKS = [(kind, name) for kind in (Broken, BrokenIpc) for name in vars(kind) if not name.startswith("_")]


@pytest.mark.parametrize("kind, wait", BREAKS)
def test_a_missing_wait_is_found(monkeypatch, kind, wait):
    """This is a test of the stand-in: without the wait, numbers or the order of things are wrong."""
    torch.manual_seed(0)
    net, plan, data = mlp(), make_plan("1-1-1", 5, 8), minibatches(16, 16, 16)
    expected = in_threads(plan, net, data, 2, **train)
    getattr(kind, wait)(monkeypatch)
    try:
        done, mistakes = trained_late(plan, net, data, "ipc" if kind is BrokenIpc else "staged")
    except (RuntimeError, IndexError):  # NaN, another head, or targets that are no classes
        return
    assert mistakes or done.losses != expected.losses
