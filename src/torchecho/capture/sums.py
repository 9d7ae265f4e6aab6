"""Find out which sums of gradients lie on their first summand.

Autograd's engine adds a gradient to what has arrived before it, and does so in place where nobody else holds that.
While a dispatch mode is active it allocates each sum, so a recorded step shows more memory than the next ones take.

Relies on: `InputBuffer::accumulate` of torch/csrc/autograd/input_buffer.cpp (torch 2.11 to 2.15).
"""

from torchecho.capture.recording import LAYOUT_BITS, Log


def find_sums_in_place(log: Log, backward_starts: int) -> dict[int, int]:
    """Return, for each storage of a sum that takes no memory of its own, the storage of its first summand.

    Args:
        log: A step, with the positions of the sums that the engine made.
        backward_starts: Position of the first call of its backward.
    """
    looks = log.layouts.looks()
    lies_on: dict[int, int] = {}
    for position in log.sums:
        sights = [(sight >> LAYOUT_BITS, looks[sight & (1 << LAYOUT_BITS) - 1]) for sight in log.sights[position]]
        (first, first_look), (second, _), (made, made_look) = sights
        producer = log.producers[first]
        is_last_reader = log.freed.get(first) == position + 1 and first != second
        is_own = producer is not None and producer >= backward_starts and log.producers[made] == position
        if is_last_reader and is_own and first_look._replace(offset=0) == made_look._replace(offset=0):
            lies_on[made] = lies_on.get(first, first)
    return lies_on
