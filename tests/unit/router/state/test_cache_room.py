"""How much of a prompt's text an endpoint's cache is believed to hold."""

import pytest

from services.router.state.cache_room import CacheRoom


def test_nothing_is_believed_before_the_server_has_told_its_size():
    room = CacheRoom()
    room.learn(0, found=True)
    assert room.blocks(0, 100.0) is None


def test_what_is_not_found_makes_the_room_smaller_down_to_a_floor_and_what_is_found_larger_up_to_what_was_told():
    room = CacheRoom()
    room.told(0, 10_000)
    assert room.blocks(0, 100.0) == 100
    room.learn(0, found=False)
    assert room.blocks(0, 100.0) == 90
    for _ in range(100):
        room.learn(0, found=False)
    assert room.blocks(0, 100.0) == pytest.approx(5, abs=1)
    for _ in range(1_000):
        room.learn(0, found=True)
    assert room.blocks(0, 100.0) == 100


def test_another_process_has_told_nothing_and_is_believed_whole():
    room = CacheRoom()
    room.told(0, 10_000)
    room.learn(0, found=False)
    room.forget(0)
    assert room.blocks(0, 100.0) is None
    room.told(0, 10_000)
    assert room.blocks(0, 100.0) == 100
