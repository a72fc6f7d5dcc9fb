import ctypes
import os
import signal
import struct
import sys

number = (ctypes.c_int * 1)(int(sys.argv[1]))
words = struct.pack("11Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(number), 1, 0)
child = ctypes.CDLL(None).syscall(435, words, ctypes.c_size_t(len(words)))
if child == 0:
    signal.pause()
print(child, flush=True)
sys.stdin.read()
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
