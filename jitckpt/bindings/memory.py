"""This process's memory, by its addresses."""

import ctypes

Memory = ctypes.Array[ctypes.c_char]


def bytes_at(address: int, size: int) -> bytes:
    """Return a copy of what lies there."""
    return ctypes.string_at(address, size)


def at(address: int, size: int) -> Memory:
    """Return what lies there, as a buffer; nothing keeps it there."""
    return (ctypes.c_char * size).from_address(address)


def address_of(memory: Memory) -> int:
    """Return where it lies."""
    return ctypes.addressof(memory)


def read_nowhere() -> None:
    """Read where no memory is: unlike a SIGSEGV that is sent, this comes through every handler."""
    ctypes.string_at(0)
