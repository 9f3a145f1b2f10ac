"""Asks a device plugin as kubelet does, one call after the other, in a process with nothing else to do.

Reads ``{"addresses": {resource: address}, "seats": {resource: [id]}, "calls": N}`` from standard input and writes
``{"preferred": [ms], "allocate": [ms], "floor": [ms], "given": [id]}``. A separate process, since a thread beside a
busy event loop would measure how Python shares its interpreter.
"""

import json
import random
import sys
import time

import grpc

from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.pb import deviceplugin_pb2_grpc as rpc

TIMEOUT_SECONDS = 30.0


def ask(addresses: dict[str, str], seats: dict[str, list[str]], calls: int) -> dict[str, list[object]]:
    """For one pod after another: which seat to take, and then to take it. Milliseconds of each call."""
    chance = random.Random(1)
    found: dict[str, list[object]] = {"preferred": [], "allocate": [], "floor": [], "given": []}
    channels = {resource: grpc.insecure_channel(address) for resource, address in addresses.items()}
    stubs = {resource: rpc.DevicePluginStub(channel) for resource, channel in channels.items()}
    for resource in stubs:  # the first call of a channel connects
        stubs[resource].GetDevicePluginOptions(pb.Empty(), timeout=TIMEOUT_SECONDS)
    for number in range(calls):
        resource = sorted(stubs)[number % len(stubs)]
        free = chance.sample(seats[resource], len(seats[resource]) - number % 8)
        wanted = pb.ContainerPreferredAllocationRequest(available_deviceIDs=free, allocation_size=1)
        question = pb.PreferredAllocationRequest(container_requests=[wanted])
        began = time.perf_counter()
        hint = stubs[resource].GetPreferredAllocation(question, timeout=TIMEOUT_SECONDS)
        found["preferred"].append((time.perf_counter() - began) * 1000)
        chosen = list(hint.container_responses[0].deviceIDs) or free[:1]
        order = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=chosen)])
        began = time.perf_counter()
        stubs[resource].Allocate(order, timeout=TIMEOUT_SECONDS)
        found["allocate"].append((time.perf_counter() - began) * 1000)
        found["given"] += chosen
        began = time.perf_counter()
        stubs[resource].GetDevicePluginOptions(pb.Empty(), timeout=TIMEOUT_SECONDS)
        found["floor"].append((time.perf_counter() - began) * 1000)
    for channel in channels.values():
        channel.close()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(ask(**json.load(sys.stdin))))
