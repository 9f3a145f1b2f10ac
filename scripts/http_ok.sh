#!/opt/kybernate/bin/python -IS
"""``http-ok http://127.0.0.1:9470/readyz`` or ``http-ok unix:/run/x.sock``: exit code 0 when it answers (with 200).

For health checks of containers: imports next to nothing, since it runs every few seconds in each of them.
"""

import socket
import sys

SECONDS = 3.0


def main(target: str) -> int:
    """The exit code; what was wrong goes to standard output, where ``docker inspect`` shows it."""
    try:
        if target.startswith("unix:"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(SECONDS)
                connection.connect(target.removeprefix("unix:"))
            return 0
        place, _, path = target.removeprefix("http://").partition("/")
        host, _, port = place.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
            connection.sendall(f"GET /{path} HTTP/1.0\r\nHost: {place}\r\n\r\n".encode())
            answer = b""
            while part := connection.recv(65536):
                answer += part
    except (OSError, ValueError) as error:
        sys.stdout.write(f"{target}: {error}\n")
        return 1
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.split(b" ", 2)[1:2] == [b"200"]:
        return 0
    sys.stdout.write(f"{target}: {head.splitlines()[:1]} {body[:500].decode(errors='replace')}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
