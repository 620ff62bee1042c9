"""An attestation service that tells the truth, or lies in the way that a test asks for. For tests alone."""

from __future__ import annotations

import asyncio
import base64
import time
from dataclasses import dataclass, field
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

Wire = dict[str, Any]
ISSUER = "verifier-of-tests"
GOOD = "ab" * 32
POINTER = "/submods/cpu0/measurement"


@dataclass
class Verifier:
    """`lie` names what is wrong with the answers; empty: nothing is."""

    lie: str = ""
    host: str = "127.0.0.1"
    seconds: float = 600.0
    port: int = 0
    asked: list[Wire] = field(default_factory=list)
    given: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.key = generate_private_key(SECP256R1())
        self.other = generate_private_key(SECP256R1())

    @property
    def public(self) -> str:
        """The key that an admin configures."""
        return self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/attestation"

    async def start(self) -> web.AppRunner:
        app = web.Application(client_max_size=16 << 20)
        app.router.add_post("/attestation", self._attest)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, self.host, 0)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    async def _attest(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        match self.lie:
            case "down":
                return web.Response(status=503)
            case "refuse":
                return web.Response(status=401, text="the evidence is not what it must be")
            case "slow":
                await asyncio.sleep(60)
            case "huge":
                return web.Response(text="a" * (8 << 20))
            case "no token":
                return web.Response(text="<html>welcome</html>")
            case "replay" if self.given:
                return web.Response(text=self.given[0])
        token = self.token(body["verification_requests"][0]["runtime_data"]["structured"])
        self.given.append(token)
        return web.Response(text=token)

    def token(self, runtime: Wire) -> str:
        """A token about that runtime data, with the lie in it."""
        now = time.time()
        claims: Wire = {
            "iss": ISSUER,
            "iat": now,  # with its fraction, as RFC 7519 lets it be: two within a second differ
            "exp": now + self.seconds,
            "customized_claims": {"runtime_data": dict(runtime)},
            "submods": {"cpu0": {"measurement": GOOD, "debug": False}},
        }
        echoed = claims["customized_claims"]["runtime_data"]
        match self.lie:
            case "wrong nonce":
                echoed["nonce"] = "00" * 32
            case "other node":
                echoed["bootId"] = "11111111-2222-3333-4444-555555555555"
            case "other key":
                echoed["key"] = "00" * 32
            case "no runtime data":
                del claims["customized_claims"]
            case "other measurements":
                claims["submods"]["cpu0"]["measurement"] = "cd" * 32
            case "no measurements":
                claims["submods"] = {}
            case "other issuer":
                claims["iss"] = "somebody"
            case "stale":
                claims["iat"] = int(now) - 86_400
            case "expired":
                claims["exp"] = now - 1
            case "future":
                claims["iat"] = int(now) + 86_400
            case "endless":
                claims["exp"] = float("inf")
            case "no expiry":
                del claims["exp"]
            case "bad signature":
                return jwt.encode(claims, self.other, algorithm="ES256")
            case "none":
                return jwt.encode(claims, "", algorithm="none")
            case "confused":
                return _mac(claims, self.public)
        return jwt.encode(claims, self.key, algorithm="ES256")


def _mac(claims: Wire, public: str) -> str:
    """A MAC with the public key as its secret, which PyJWT itself refuses to make."""
    import hashlib
    import hmac
    import json

    def part(content: bytes) -> str:
        return base64.urlsafe_b64encode(content).rstrip(b"=").decode()

    signed = (
        f"{part(json.dumps({'alg': 'HS256', 'typ': 'JWT'}).encode())}.{part(json.dumps(claims).encode())}"
    )
    return f"{signed}.{part(hmac.new(public.encode(), signed.encode(), hashlib.sha256).digest())}"


LIES = {
    "wrong nonce": "WrongNonce",
    "replay": "WrongNonce",
    "other node": "OtherNode",
    "other key": "OtherKey",
    "no runtime data": "Malformed",
    "other measurements": "OtherMeasurements",
    "no measurements": "OtherMeasurements",
    "other issuer": "OtherIssuer",
    "stale": "Stale",
    "expired": "Expired",
    "future": "NotYet",
    "endless": "Malformed",
    "no expiry": "Malformed",
    "bad signature": "BadSignature",
    "none": "BadSignature",
    "confused": "BadSignature",
    "no token": "Malformed",
    "huge": "TooLarge",
}
"""What each lie is found to be."""
