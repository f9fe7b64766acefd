"""Uses vnumad by a client that openapi-python-client has made of docs/openapi.json.

Arguments: vnumad's socket, and the name of a VM of two vCPUs that is not attached; its second node has CPU 1.
Each answer has to be of the type that the description says, and to read back as what was sent.
"""

import json
import sys
import time

import httpx
from vnuma_client import Client
from vnuma_client.api.default import (
    attach,
    cancel_migration,
    capacity,
    daemon,
    detach,
    devices,
    hardware,
    list_,
    metrics,
    migrate,
    move_vcpu,
    openapi,
    place,
    placements,
    policies,
    rehome,
    release,
    replug,
    resize,
    set_memory_policy,
    set_policy,
    show,
    show_memory,
    show_migration,
    show_policy,
    show_rehome,
    show_sizes,
    stop_rehome,
    stop_resize,
    watch,
)
from vnuma_client.models import (
    ApiError,
    AttachRequest,
    MemoryPolicyRequest,
    MigrateRequest,
    MoveRequest,
    Observation,
    PlaceRequest,
    PolicyRequest,
    RehomeRequest,
    ReplugRequest,
    ResizeRequest,
    Vm,
)

LIMIT_S = 60


def main(socket, name):
    transport = httpx.HTTPTransport(uds=socket)
    client = Client(base_url="http://vnumad", httpx_args={"transport": transport},
                    raise_on_unexpected_status=True)
    reads(client, name)
    channel(client, name)
    moves(client, name)
    sets(client, name)
    streams(client, name)
    places(client)
    refusals(client, name)
    refusals_of_memory(client, name)
    answer(detach.sync_detailed(name, client=client))
    wait_for("the VM to be detached", lambda: shown(client, name).channel == "none")
    print("all is as described")


def plain(value):
    """As JSON, of what the client has made."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value.to_dict() if hasattr(value, "to_dict") else value


def answer(response, status=200):
    """What was answered. It has a type, and nothing is lost or added by that."""
    assert response.status_code == status, f"{response.status_code}: {response.content}"
    assert response.parsed is not None, f"no type: {response.content}"
    assert isinstance(response.parsed, ApiError) == (status != 200), response.parsed
    sent = json.loads(response.content)
    assert plain(response.parsed) == sent, f"{plain(response.parsed)} is not {sent}"
    return response.parsed


def wait_for(what, ready):
    until = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < until, f"waited for {what}"
        time.sleep(0.05)


def shown(client, name):
    return answer(show.sync_detailed(name, client=client))


def reads(client, name):
    listed = answer(list_.sync_detailed(client=client))
    assert [vm.name for vm in listed] == [name] and isinstance(listed[0], Vm), listed
    for operation in [capacity, daemon, devices, hardware, placements, policies]:
        answer(operation.sync_detailed(client=client))
    for operation in [show_policy, show_sizes]:
        answer(operation.sync_detailed(name, client=client))
    # A VM that is made up has no memory that can be looked at.
    assert name in answer(show_memory.sync_detailed(name, client=client), 502).message
    # Its description is JSON of no type, and metrics are text.
    assert openapi.sync_detailed(client=client).status_code == 200
    text = metrics.sync_detailed(client=client)
    assert text.status_code == 200 and f'vm="{name}"' in text.content.decode(), text


def channel(client, name):
    attached = answer(attach.sync_detailed(name, client=client, body=AttachRequest()))
    assert attached.channel in ("attached", "attaching"), attached.channel
    wait_for("the guest to be told", lambda: all(vcpu.state == "true" for vcpu in shown(client, name).vcpus))
    assert shown(client, name).channel == "attached"


def moves(client, name):
    answer(move_vcpu.sync_detailed(name, client=client, body=MoveRequest(vcpu=0, node=1)))
    wait_for("the guest to be told of the move", lambda: shown(client, name).vcpus[0].acked_node == 1)
    assert shown(client, name).vcpus[0].host_node == 1


def sets(client, name):
    policy = answer(set_policy.sync_detailed(name, client=client, body=PolicyRequest(policy="observe")))
    assert policy.policy == "observe", policy
    answer(set_policy.sync_detailed(name, client=client, body=PolicyRequest(policy="off")))
    wanted = MemoryPolicyRequest(policy="adaptive")
    assert answer(set_memory_policy.sync_detailed(name, client=client, body=wanted)).policy == "adaptive"


def streams(client, name):
    """Lines without end have no type in the client, and what they are has one."""
    with lines(client, "/v1/observations") as observations, lines(client, "/v1/watch?events=policy") as events:
        answer(set_policy.sync_detailed(name, client=client, body=PolicyRequest(policy="observe")))
        event = json.loads(next(events.iter_lines()))
        assert (event["event"], event["vm"], event["policy"]) == ("policy", name, "observe"), event
        sent = json.loads(next(observations.iter_lines()))
        assert plain(Observation.from_dict(sent)) == sent, sent
    answer(set_policy.sync_detailed(name, client=client, body=PolicyRequest(policy="off")))
    answer(watch.sync_detailed(client=client, events="nonsense"), 400)


def lines(client, path):
    return client.get_httpx_client().stream("GET", path, timeout=LIMIT_S)


def places(client):
    wanted = PlaceRequest(name="other", vcpus=4, memory_bytes=512 << 20)
    placed = answer(place.sync_detailed(client=client, body=wanted))
    assert len(placed.reservation.placement.guest_nodes) == 1, placed
    assert answer(placements.sync_detailed(client=client)), "no reservation"
    answer(place.sync_detailed(client=client, body=wanted), 409)
    answer(release.sync_detailed("other", client=client))
    answer(release.sync_detailed("other", client=client), 404)


def refusals(client, name):
    nobody = answer(show.sync_detailed("nobody", client=client), 404)
    assert "nobody" in nobody.message, nobody
    answer(attach.sync_detailed(name, client=client, body=AttachRequest()), 409)
    answer(move_vcpu.sync_detailed(name, client=client, body=MoveRequest(vcpu=99, node=1)), 404)
    answer(migrate.sync_detailed(name, client=client, body=MigrateRequest(destination="exec:false")), 400)
    answer(show_migration.sync_detailed(name, client=client), 404)
    answer(cancel_migration.sync_detailed(name, client=client), 404)
    answer(replug.sync_detailed(name, client=client, body=ReplugRequest(vcpu=1)), 409)


def refusals_of_memory(client, name):
    answer(show_rehome.sync_detailed(name, client=client))
    answer(rehome.sync_detailed(name, client=client, body=RehomeRequest(guest_node=9, node=0)), 404)
    answer(rehome.sync_detailed(name, client=client, body=RehomeRequest(guest_node=0, node=9)), 404)
    answer(stop_rehome.sync_detailed(name, client=client), 409)
    answer(resize.sync_detailed(name, client=client, body=ResizeRequest(guest_node=9, size_bytes=1 << 30)), 404)
    answer(resize.sync_detailed(name, client=client, body=ResizeRequest(guest_node=0, size_bytes=1 << 30)), 502)
    answer(stop_resize.sync_detailed(name, client=client), 409)


if __name__ == "__main__":
    main(*sys.argv[1:])
