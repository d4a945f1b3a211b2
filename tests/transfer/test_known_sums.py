"""Checksums that a source knows before a move asks for them."""

from peer import CHUNK_PAGES, PAGE_TOKENS, Peer, PeerOptions

from psrl_sglang.store.sums import checksum, cut
from psrl_sglang.transfer.client import MoveClient


def tokens_of(pages: int, seed: int = 0) -> list[int]:
    return list(range(seed, seed + pages * PAGE_TOKENS))


def sums_of(peer: Peer) -> list[bytes]:
    chunks = sorted(peer.store.dram.index.chunks(), key=lambda chunk: chunk.start)
    return [chunk.sums for chunk in chunks]


def test_full_chunks_have_theirs_when_they_are_stored_and_unfull_ones_have_none():
    with Peer(PeerOptions()) as peer:
        peer.compute(tokens_of(2 * CHUNK_PAGES + 1))
        assert [bool(sums) for sums in sums_of(peer)] == [True, True, False]
        peer.compute(tokens_of(3 * CHUNK_PAGES))
        assert all(sums_of(peer))
        for chunk in peer.store.dram.index.chunks():
            with peer.store.dram.lease_chunk(chunk) as lease:
                view = peer.store.dram.payload(lease.pieces[0])
                assert chunk.sums == b"".join(checksum(piece) for piece in cut(view))


def test_a_destination_keeps_those_of_whole_chunks_for_the_next_move():
    with Peer(PeerOptions()) as a, Peer(PeerOptions(instance_id="b")) as b:
        tokens = tokens_of(2 * CHUNK_PAGES + 2)
        a.compute(tokens)
        assert MoveClient().transfer_direct(tokens, a.command, b.data, "1").ok
        assert sums_of(b) == sums_of(a)
        assert b.verified(tokens) == 2 * CHUNK_PAGES + 2


def test_what_changed_in_memory_since_it_was_stored_is_not_taken():
    with Peer(PeerOptions()) as a, Peer(PeerOptions(instance_id="b")) as b:
        tokens = tokens_of(2 * CHUNK_PAGES)
        a.compute(tokens)
        second = next(chunk for chunk in a.store.dram.index.chunks() if chunk.start)
        with a.store.dram.lease_chunk(second) as lease:
            a.store.dram.payload(lease.pieces[0])[100] ^= 1
        result = MoveClient().transfer_direct(tokens, a.command, b.data, "1")
        assert result.present_tokens == CHUNK_PAGES * PAGE_TOKENS
        assert "damaged" in result.reason
        assert b.verified(tokens) == CHUNK_PAGES
