"""Waiting: a simulation in which no message overlaps with computing (`Cluster.waits_for_messages`).

Not known here: programs and plans. Invariant: a send waits for no receive, so that no program that ends with
buffered sends waits for ever.
"""

from hybridpipe.planning.simulator.ranks import Key, Message, Rank
from hybridpipe.planning.simulator.simulator import Simulation


class WaitingSimulation(Simulation):
    """A run in which a rank spends the whole of each of its messages in it.

    A send lasts until its message has arrived. A receive lasts until then as well, but as long as the message
    alone on its link if it comes later than the send.
    """

    def send(self, rank: Rank, key: Key, num_bytes: float) -> bool:
        """Send a message; its arrival ends the instruction."""
        super().send(rank, key, num_bytes)
        return False

    def handed_over(self, message: Message) -> None:
        """Start the transfer of a message."""
        self.transfer(message)

    def transfer(self, message: Message) -> None:
        """Start the transfer; from now on the message can be received."""
        message.is_sent = True
        super().transfer(message)

    def receive(self, rank: Rank, key: Key) -> bool:
        """Wait for a message, or spend its time alone on the link if it was sent already."""
        message = self.message(key)
        message.receiver = rank
        if message.is_sent:
            message.is_late = True
            link = self.cluster.link(*key[:2])
            seconds = link.latency_seconds + message.num_bytes / link.bandwidth
            self.engine.after(seconds, self.spent, message)
        return False

    def spent(self, message: Message) -> None:
        """Continue a receiver that came late, unless its message is still on its way."""
        message.is_late = False
        if message.arrived:
            self.wake_receiver(message)

    def arrive(self, message: Message) -> None:
        """Note the arrival of a message; continue its sender, and a receiver that waits for it."""
        message.arrived = True
        self.finish(message.sender)
        if message.receiver is not None and not message.is_late:
            self.wake_receiver(message)
