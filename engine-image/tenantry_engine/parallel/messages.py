"""What rank 0 tells the other ranks and hears from them, in MessagePack: plain data, so that decoding runs no code."""

from __future__ import annotations

import msgspec

from tenantry_engine.rows import Rows


class Begin(msgspec.Struct, tag=True, array_like=True):
    """Join the group and load this rank's part of the model."""

    rank: int
    size: int
    meeting: str
    model: str
    dtype: str
    device: str
    threads: int
    data_dir: str
    max_rank: int  # of adapters
    target_modules: list[str]
    host_bytes: int


class Allocate(msgspec.Struct, tag=True, array_like=True):
    """Make a pool of so many pages, for sequences of so many tokens."""

    pages: int
    positions: int


class Run(msgspec.Struct, tag=True, array_like=True):
    """Run one step."""

    rows: Rows


class Wipe(msgspec.Struct, tag=True, array_like=True):
    """These pages held an adapter: zero them."""

    pages: list[int]


class Fill(msgspec.Struct, tag=True, array_like=True):
    """Put this rank's part of a stored adapter into these pages. Answered by `Filled`."""

    digest: str
    pages: list[int]


class Forget(msgspec.Struct, tag=True, array_like=True):
    """The adapter has left the replica, or its bytes were wrong: keep nothing of it."""

    digest: str


class Loaded(msgspec.Struct, tag=True, array_like=True):
    """The model's part is in memory of this process."""

    pid: int


class Allocated(msgspec.Struct, tag=True, array_like=True):
    """The pool is there: steps may come."""


class Filled(msgspec.Struct, tag=True, array_like=True):
    """The pages hold the adapter, or `problem` says why not."""

    problem: str = ""


class Failed(msgspec.Struct, tag=True, array_like=True):
    """This rank cannot go on, and ends."""

    reason: str


ToFollower = Begin | Allocate | Run | Wipe | Fill | Forget
ToLeader = Loaded | Allocated | Filled | Failed

to_follower = msgspec.msgpack.Decoder(ToFollower)
to_leader = msgspec.msgpack.Decoder(ToLeader)
encode = msgspec.msgpack.Encoder().encode
