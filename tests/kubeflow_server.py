"""A status server as Kubeflow Trainer's, for tests: HTTPS, with a token that it wants."""

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from certificates import certificates

from jitckpt.clusters import kubeflow

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/n/trainjobs/gpt/status"


class Server:
    """Takes reports as Kubeflow's does; or answers with another status, or never."""

    def __init__(self, folder: Path) -> None:
        self.reports: list[dict[str, Any]] = []
        self.asked = 0
        self.answer: int | None = 200
        self.released = threading.Event()
        (folder / "token").write_text("a token\n")
        certificates(folder)
        this = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                this.asked += 1
                assert self.headers["Authorization"] == f"Bearer {(folder / 'token').read_text().strip()}"
                assert self.path == PATH
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if this.answer is None:
                    this.released.wait(60)
                elif this.answer == 200:
                    this.reports.append(body["trainerStatus"])
                self.send_response(this.answer or 200)
                self.end_headers()
                self.wfile.write(b'{"message": "Forbidden"}' if this.answer != 200 else b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "own.crt", folder / "own.key")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.environment = {
            kubeflow.URL: f"https://127.0.0.1:{self.server.server_address[1]}{PATH}",
            kubeflow.CERTIFICATE: str(folder / "ca.crt"),
            kubeflow.TOKEN: str(folder / "token"),
        }

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
