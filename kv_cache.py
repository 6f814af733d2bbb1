"""The KV cache: allocated once, written in place, never copied.

One *slot* holds the keys and values of one request, for up to `max_len` positions and for every
layer (SARATHI §4.5: "we pre-allocate the KV cache as per the maximum sequence length"). `KVCache`
is the memory; `Slots` says who owns which part of it and knows nothing of tensors, so that a
scheduler can be run without any.

Read next: attention.py, which reads what is written here.
"""

import heapq

import torch


def kv_bytes_per_token(config, dtype):
    """Bytes that the keys and values of one token take in all layers (m_kv in SARATHI §4.3.1)."""
    return config.n_layer * 2 * config.n_kv_head * config.head_dim * dtype.itemsize


def max_slots(memory_bytes, weight_bytes, max_len, kv_bytes_per_token):
    """How many requests fit: B = floor((M_G - M_S) / (L * m_kv)), SARATHI §4.3.1.

    `memory_bytes` (M_G) is the memory of the device, `weight_bytes` (M_S) what the parameters take of
    it, `max_len` (L) the longest sequence in tokens. Returns 0 when not one request fits.
    """
    return max(0, (memory_bytes - weight_bytes) // (max_len * kv_bytes_per_token))


class KVCache:
    """Keys and values of `slots` requests of up to `max_len` tokens.

    Logical shape: (n_layer, 2, slots, n_kv_head, max_len, head_dim), where index 0 of the second
    dimension is K and 1 is V. The strides depend on the device, because kernels differ in what they
    like: on CUDA the positions of all slots merge into one dimension, with the heads of a position side
    by side, as xformers wants them; elsewhere the positions of one head are side by side.

    Positions that were never written hold whatever the memory held. Nothing reads them.
    """

    def __init__(self, config, slots, max_len, device="cpu", dtype=torch.float32, position_major=None):
        """Allocate `kv_bytes(...)` bytes. Raises ValueError if `slots` or `max_len` is below 1.

        `position_major` is the layout of CUDA; None: as the device likes it.
        """
        for name, value in (("slots", slots), ("max_len", max_len)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.slots, self.max_len = slots, max_len
        if position_major is None:
            position_major = torch.device(device).type == "cuda"
        inner = (max_len, config.n_kv_head) if position_major else (config.n_kv_head, max_len)
        self.data = torch.empty(config.n_layer, 2, slots, *inner, config.head_dim, device=device, dtype=dtype)
        if position_major:
            self.data = self.data.transpose(3, 4)

    @staticmethod
    def kv_bytes(config, slots, max_len, dtype):
        """Bytes that a cache of this size will take, without allocating it."""
        return slots * max_len * kv_bytes_per_token(config, dtype)

    def layer(self, layer):
        """(keys, values) of layer number `layer`, two views of shape (slots, n_kv_head, max_len, head_dim)."""
        return self.data[layer, 0], self.data[layer, 1]

    def write(self, layer, k, v, slots, positions):
        """Store k and v, (num_tokens, n_kv_head, head_dim), at (slots[i], positions[i]), in place."""
        keys, values = self.layer(layer)
        keys[slots, :, positions] = k
        values[slots, :, positions] = v


class Slots:
    """Which slots are free and which are owned. The lowest free slot is given out first."""

    def __init__(self, slots):
        self.slots = slots
        self._free = list(range(slots))  # a heap: sorted lists are heaps
        self._owned = set()

    @property
    def num_free(self):
        """How many more requests can be admitted."""
        return len(self._free)

    def allocate(self):
        """Take a slot and return its index, or None if all are owned."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._owned.add(slot)
        return slot

    def free(self, slot):
        """Give a slot back. Raises RuntimeError if nobody owned it (it would be handed out twice)."""
        if slot not in self._owned:
            raise RuntimeError(f"slot {slot} was freed but is not owned")
        self._owned.remove(slot)
        heapq.heappush(self._free, slot)

    def check_integrity(self):
        """Raise RuntimeError unless every slot is either free or owned, exactly once."""
        if sorted([*self._free, *self._owned]) != list(range(self.slots)):
            raise RuntimeError(f"slots leaked or shared: free {sorted(self._free)}, owned {sorted(self._owned)}")
