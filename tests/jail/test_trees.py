"""Folders that model code has made to be hard to measure and to remove."""

import os
import threading

import pytest

from arpo.jail.limits import CallLimits
from arpo.jail.trees import exceeds, remove_tree

LIMITS = CallLimits(scratch_bytes=1 << 20, scratch_inodes=100, scratch_depth=64)
LONG_NAME = "x" * 255


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "scratch"


@pytest.fixture
def victim(tmp_path):
    """A folder elsewhere, with a file."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("keep")
    return tmp_path / "victim"


def make_deep(folder, depth: int, name: str = "d") -> int:
    """Make so many folders within each other; return a descriptor of the last one."""
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=fd)
        parent, fd = fd, os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(parent)
    return fd


@pytest.mark.parametrize("depth", [1200, 6000])
def test_a_folder_of_any_depth_is_removed(folder, depth):
    os.close(make_deep(folder, depth))
    remove_tree(str(folder))
    assert not folder.exists()


def test_a_folder_that_is_nested_too_deep_is_over_the_quota_and_a_usual_one_is_not(folder, tmp_path):
    os.close(make_deep(folder, LIMITS.scratch_depth))
    assert not exceeds(str(folder), LIMITS)
    os.close(make_deep(tmp_path / "deeper", LIMITS.scratch_depth + 1))
    assert exceeds(str(tmp_path / "deeper"), LIMITS)


def test_files_whose_path_is_too_long_for_the_kernel_are_counted_and_removed(folder):
    fd = make_deep(folder, 20, LONG_NAME)
    assert not exceeds(str(folder), LIMITS)
    with open("file", "wb", opener=lambda name, flags: os.open(name, flags, dir_fd=fd)) as file:
        file.write(os.urandom(2 << 20))
    os.close(fd)
    assert exceeds(str(folder), LIMITS)
    remove_tree(str(folder))
    assert not folder.exists()


def test_many_small_files_in_many_folders_are_counted_together(folder):
    for number in range(34):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "a").touch()
    assert not exceeds(str(folder), LIMITS)
    for number in range(34):
        (folder / str(number) / "b").touch()
    assert exceeds(str(folder), LIMITS)


def test_links_closed_folders_and_odd_names_are_removed_and_their_targets_are_not(folder, victim):
    (folder / "a\n b" / "c").mkdir(parents=True)
    (folder / "link").symlink_to(victim)
    (folder / "a\n b" / "c" / "link").symlink_to(victim)
    os.mkfifo(folder / "pipe")
    for closed in (folder / "a\n b" / "c", folder / "a\n b"):
        closed.chmod(0)
    mode = victim.stat().st_mode
    remove_tree(str(folder))
    assert not folder.exists() and (victim / "file").read_text() == "keep" and victim.stat().st_mode == mode


def test_a_link_in_the_place_of_the_folder_is_not_followed(folder, victim):
    folder.symlink_to(victim)
    assert not exceeds(str(folder), LIMITS)
    remove_tree(str(folder))
    assert (victim / "file").read_text() == "keep"


def test_measuring_and_removing_while_somebody_writes_raises_nothing(folder):
    folder.mkdir()
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for number in range(20):
                (folder / f"{number}/{number}").mkdir(parents=True, exist_ok=True)
            for number in range(20):
                (folder / f"{number}/{number}").rmdir()
                (folder / f"{number}").rmdir()

    thread = threading.Thread(target=churn)
    thread.start()
    for _ in range(50):
        exceeds(str(folder), LIMITS)
    stop.set()
    thread.join()
    remove_tree(str(folder))
    assert not folder.exists()
