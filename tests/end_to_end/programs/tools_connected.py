import os
import runpy
import socket
import sys

daemon = socket.socket(socket.AF_UNIX)
daemon.connect("daemon")
log = open("log", "a")
large = open("large", "ab")
os.truncate("large", 100_000_000)
outside = socket.create_connection(("127.0.0.1", int(sys.argv.pop(1))))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
