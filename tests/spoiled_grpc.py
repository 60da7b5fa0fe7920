"""What the fuzz sends to the gRPC port: messages of calls, and bytes that are no HTTP/2."""

import json
import random

from protos import common_pb2, inference_pb2
from tests.frontend import API_KEY
from tests.fuzzing import mutate_bytes, spoil_message
from tests.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    greeting,
    grpc_call,
    grpc_headers,
    grpc_message,
    pack_headers,
)
from tests.openai import TOOL
from tests.spoiled_http import CALLS, make_http

GENERATE = "/lockstep.v1.Inference/Generate"
REQUESTS: list[inference_pb2.GenerateRequest] = [
    inference_pb2.GenerateRequest(
        request_id="a",
        text="two words",
        sampling_params=common_pb2.SamplingParams(
            max_tokens=3,
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            n=2,
            logprobs=1,
            prompt_logprobs=1,
            stop=["x"],
            bad_words=["y"],
            logit_bias={5: 1.5},
            stop_token_ids=[7],
        ),
    ),
    inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[3, 4, 5]),
        sampling_params=common_pb2.SamplingParams(max_tokens=3, json_schema='{"type": "null"}'),
        cache_salt="salt",
        priority=1,
    ),
    inference_pb2.GenerateRequest(
        chat=inference_pb2.Chat(
            messages=[
                inference_pb2.ChatMessage(role="user", content="a"),
                inference_pb2.ChatMessage(role="assistant", fields=json.dumps(CALLS)),
            ],
            tools=[json.dumps(TOOL)],
            template_arguments='{"a": 1}',
        ),
        sampling_params=common_pb2.SamplingParams(max_tokens=3, regex="[ab]*"),
    ),
    inference_pb2.GenerateRequest(
        resume=inference_pb2.Resume(
            seed=5,
            prompt_token_ids=inference_pb2.TokenIds(ids=[3, 4]),
            model_fingerprint="same",
            outputs=[inference_pb2.TokenIds(ids=[7])],
        ),
        sampling_params=common_pb2.SamplingParams(max_tokens=3),
    ),
]
METHODS = (
    *("Inference/Generate",) * 6,
    *("Inference/Tokenize", "Inference/Detokenize", "Inference/GetModel", "Inference/GetStats"),
    "Inference/Nothing",
)
FRAME_KINDS = (
    *(DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION),
    *(2, 5, 77),
)


def spoil_grpc(draw: random.Random) -> bytes:
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(draw.choice(REQUESTS))
    match draw.randrange(8):
        case 0:
            return draw.randbytes(draw.choice([1, 5, 50, 500]))
        case 1:
            request.Clear()
            spoil_message(draw, request, 0.4)
            return request.SerializeToString()
        case 2 | 3 | 4:
            spoil_message(draw, request.sampling_params, 0.08)
            if draw.random() < 0.3:
                spoil_message(draw, request, 0.2)
            return request.SerializeToString()
        case _:
            return mutate_bytes(draw, request.SerializeToString())


def make_frames(draw: random.Random) -> bytes:
    """Bytes at the gRPC port: HTTP/2 that is wrong in some way, or none."""
    message = draw.choice(REQUESTS).SerializeToString()
    call = grpc_call(GENERATE, API_KEY, message)
    match draw.randrange(6):
        case 0:
            return draw.randbytes(draw.choice([1, 30, 3000]))
        case 1:
            return make_http(draw)
        case 2:
            return mutate_bytes(draw, greeting() + call)
        case 3:
            return greeting() + mutate_bytes(draw, call)
        case 4:
            headers = pack_headers(_spoil_headers(draw))
            head = frame(HEADERS, headers, flags=END_HEADERS, stream=draw.choice([0, 1, 2, 3]))
            size = grpc_message(message, flag=draw.choice([0, 1, 9]))
            return greeting() + head + frame(DATA, size, flags=draw.choice([0, 1]), stream=1)
        case _:
            return greeting() + b"".join(
                frame(
                    draw.choice(FRAME_KINDS),
                    draw.randbytes(draw.choice([0, 4, 8, 50])),
                    flags=draw.randrange(256),
                    stream=draw.choice([0, 1, 2, 1 << 30]),
                )
                for _ in range(draw.randint(1, 5))
            )


def _spoil_headers(draw: random.Random) -> list[tuple[str, str]]:
    headers = grpc_headers(GENERATE, API_KEY)
    place = draw.randrange(len(headers))
    name, value = headers[place]
    headers[place] = draw.choice(
        [("x", value), (name, ""), (name, value * 200), (name.upper(), value), (name, "\xff")]
    )
    return headers + draw.choice([[], headers, [("grpc-timeout", "-1S")], [("grpc-encoding", "x")]])
