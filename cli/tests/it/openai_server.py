"""An OpenAI-compatible server with the faults that a test asks for by the model's name. Prints its port.

A word is a token and the chat template takes 30.
fine: answers. flaky: every third stream is refused with 503. strict: refuses ignore_eos and ends early.
cut: breaks streams off. silent: takes streams and never answers. locked: wants the key sk-of-the-tests-0123.
kept: answers and keeps connections alive. held: the same, and holds each third answer of a connection back.
A second argument names certificate and key in one file: it speaks TLS.
"""
import http.server
import json
import ssl
import sys
import threading
import time

MODEL = sys.argv[1]
lock = threading.Lock()
stats = {"streams": 0, "in_flight": 0, "max_in_flight": 0}


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.locked():
            return
        self.answer(200, stats if self.path == "/stats" else {"object": "list", "data": [{"id": MODEL}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.locked():
            return
        if MODEL == "strict" and "ignore_eos" in body:
            return self.answer(400, {"error": {"message": "unknown field ignore_eos"}})
        prompt = 30 + sum(len(message["content"].split()) for message in body["messages"])
        if not body["stream"]:
            return self.answer(200, {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": 1}})
        with lock:
            stats["streams"] += 1
            number = stats["streams"]
            stats["in_flight"] += 1
            stats["max_in_flight"] = max(stats["max_in_flight"], stats["in_flight"])
        try:
            self.stream(body["max_tokens"], prompt, number)
        finally:
            with lock:
                stats["in_flight"] -= 1

    def locked(self):
        locked = MODEL == "locked" and self.headers["authorization"] != "Bearer sk-of-the-tests-0123"
        if locked:
            self.answer(401, {"error": {"message": "no such key"}})
        return locked

    def stream(self, tokens, prompt, number):
        if MODEL == "flaky" and number % 3 == 0:
            return self.answer(503, {"error": {"message": "queue is full"}})
        if MODEL == "silent":
            time.sleep(60)
        if MODEL in ("kept", "held"):
            return self.kept(tokens, prompt)
        tokens = tokens if MODEL != "strict" else tokens // 2
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for _ in range(tokens):
            time.sleep(0.005)
            self.event({"choices": [{"delta": {"content": " x"}}], "usage": None})
            if MODEL == "cut":
                self.close_connection = True
                return
        self.event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        self.event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}})
        self.wfile.write(b": bye\n\ndata: [DONE]\n\n")
        self.close_connection = True

    def kept(self, tokens, prompt):
        self.answered = getattr(self, "answered", 0) + 1
        if MODEL == "held" and self.answered == 3:
            time.sleep(60)
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
        chunks = [{"choices": [{"delta": {"content": " x" * tokens}}]}, {"choices": [{"delta": {}, "finish_reason": "length"}]}]
        events = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in [*chunks, {"choices": [], "usage": usage}])
        self.answer(200, events + b"data: [DONE]\n\n")

    def event(self, chunk):
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def answer(self, status, body):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class Listener(http.server.ThreadingHTTPServer):
    request_queue_size = 64


server = Listener(("127.0.0.1", 0), Server)
if len(sys.argv) > 2:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[2])
    # the handshake is the business of the connection's own thread
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
print(server.server_address[1], flush=True)
server.serve_forever()
