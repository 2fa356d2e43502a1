"""Frames and the handshake: what is torn, too long, slow or from a stranger, over real sockets."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
import torch

from dsl.stage import PoolRendezvous
from ops.lib.stream.frames import LENGTH, LONGEST_HEAD, BrokenStream, Frames
from ops.lib.stream.handshake import WrongSecret, answer_greeting, greet
from ops.lib.stream.rendezvous import announced, connect, listen

SECRET = bytes(range(32))


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_heads_and_tensors_arrive_as_they_were_sent_though_the_socket_takes_little_at_once(pair):
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sender, receiver = (Frames(end) for end in pair)
    torch.manual_seed(0)
    large, bits = torch.randn(1024, 1024), torch.randint(0, 256, (7, 3), dtype=torch.uint8).view(torch.float8_e4m3fn)
    sending = threading.Thread(target=lambda: [sender.send({"n": n}, [large, bits, large[:0]]) for n in range(2)])
    sending.start()
    for n in range(2):
        assert {"n": n} == receiver.receive()
        got, got_bits = torch.empty_like(large), torch.empty_like(bits)
        receiver.receive_into(got)
        receiver.receive_into(got_bits)
        assert torch.equal(large, got)
        assert torch.equal(bits.view(torch.uint8), got_bits.view(torch.uint8))
    sending.join()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"", "closed the connection"),
        (LENGTH.pack(10)[:3], "closed the connection"),
        (LENGTH.pack(10) + b'{"unit"', "closed the connection"),
        (LENGTH.pack(LONGEST_HEAD + 1), "a head of 16,777,217 bytes was announced"),
        (LENGTH.pack(5) + b"\x80\x04\x95..", "no JSON"),
        (LENGTH.pack(4) + b"[17]", "no JSON object"),
    ],
)
def test_what_is_no_frame_is_a_broken_stream(pair, sent, expected):
    pair[0].sendall(sent)
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(BrokenStream, match=expected):
        Frames(pair[1]).receive()


def test_a_head_that_no_reader_would_take_is_not_sent(pair):
    with pytest.raises(ValueError, match="at most 16,777,216 are sent"):
        Frames(pair[0]).send({"rows": "x" * LONGEST_HEAD})


def both(pair, server_secret, client_secret):
    with ThreadPoolExecutor(2) as pool:
        server = pool.submit(greet, Frames(pair[0]), server_secret, {"side": "server"})
        client = pool.submit(answer_greeting, Frames(pair[1]), client_secret, {"side": "client"})
        for done, end in ((server, pair[0]), (client, pair[1])):
            if done.exception():
                end.close()
        return [done.exception() or done.result() for done in (server, client)]


def test_two_that_know_the_secret_learn_each_others_facts(pair):
    assert [{"side": "client"}, {"side": "server"}] == both(pair, SECRET, SECRET)


def test_a_client_without_the_secret_is_refused_before_it_learns_anything(pair):
    server, client = both(pair, SECRET, bytes(32))
    assert isinstance(server, WrongSecret)
    assert isinstance(client, OSError)


def test_a_server_that_sends_the_clients_own_proof_back_is_refused(pair):
    server = Frames(pair[0])

    def mirror():
        server.send({"nonce": bytes(32).hex()})
        answer = server.receive()
        server.send({"proof": answer["proof"], "facts": {}})

    with ThreadPoolExecutor(1) as pool:
        mirrored = pool.submit(mirror)
        with pytest.raises(WrongSecret, match="the server does not know"):
            answer_greeting(Frames(pair[1]), SECRET, {})
        mirrored.result()


@pytest.mark.parametrize("message", [{}, {"nonce": 5}, {"nonce": "zz"}, {"nonce": "00"}])
def test_a_greeting_without_a_nonce_breaks(pair, message):
    Frames(pair[0]).send(message)
    with pytest.raises(BrokenStream, match="without 32 bytes of nonce"):
        answer_greeting(Frames(pair[1]), SECRET, {})


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_a_worker_is_found_and_reached_however_long_the_folders_name(tmp_path, address):
    private = tmp_path / ("private-" + "x" * 120)
    private.mkdir(mode=0o700)
    pool = PoolRendezvous(workers=2, folder=tmp_path / "pool", private=private, address=address, secret=SECRET.hex())
    assert [] == announced(pool)
    with listen(attrs.evolve(pool, worker=1, start=3)) as server:
        assert ["1-3"] == announced(pool)
        with connect(pool, "1-3") as client:
            accepted, _ = server.accept()
            with accepted:
                accepted.sendall(b"hello")
                assert b"hello" == client.recv(5)
    with pytest.raises(OSError, match="refused"):
        connect(pool, "1-3")
    place = json.loads((pool.folder / "1-3.json").read_text())
    assert {"unix": "1-3"} == place or {"host", "port"} == place.keys()
