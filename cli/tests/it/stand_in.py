#!/usr/bin/env python3
"""Stands in for tandem-engine and tandem-router: their flags, health and signals, none of their work.

It writes "name event" lines into the file `events` beside itself, ends with code 4 on a model that reads "broken", and
neither gets ready nor stops on one that reads "deaf".
"""
import http.server
import os
import signal
import sys
import threading
import time

here = os.path.dirname(os.path.abspath(__file__))
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
name = flags.get("--role", "router")


def event(what):
    with open(os.path.join(here, "events"), "a") as file:
        file.write(f"{name} {what}\n")


with open(flags.get("--model") or flags["--tokenizer"]) as file:
    content = file.read(8).strip()
    if content == "broken":
        print("error: model.gguf is cut off: tensor 7 ends at byte 900 of 600", file=sys.stderr, flush=True)
        sys.exit(4)

began = time.monotonic()


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        percent = 40 if content == "deaf" else int((time.monotonic() - began) * 500)
        status, body = (200, '{"status":"ready"}') if percent >= 100 else (503, '{"loading":%d}' % percent)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        pass


def stop(*_):
    if content == "deaf":
        event("was asked to stop")
        return
    event("stopped")
    print("drained", file=sys.stderr, flush=True)
    os._exit(0)


signal.signal(signal.SIGTERM, stop)
host, port = flags["--ops-listen"].rsplit(":", 1)
server = http.server.ThreadingHTTPServer((host, int(port)), Health)
event(f"started {os.getpid()} {flags['--listen']} {flags['--ops-listen']}")
print("loading", file=sys.stderr, flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    signal.pause()
