"""Pure functions on NVML's values: addresses, profile names, links through switches."""

from types import SimpleNamespace

import pytest

from kybernate.gpus.nvml_hardware import NvLinkPorts, bonded, mig_profile, pci_address

A, B = "0000:11:00.0", "0000:21:00.0"
MIB = 1 << 20


@pytest.mark.parametrize(
    ("nvml", "sysfs"),
    [
        ("00000000:3B:00.0", A.replace("11", "3b")),
        ("0000000A:C1:00.0", "000a:c1:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
    ],
)
def test_pci_addresses_are_named_as_in_sysfs(nvml, sysfs):
    assert pci_address(nvml) == sysfs


@pytest.mark.parametrize(
    ("gpu_mib", "slices", "compute", "mib", "profile"),
    [
        (81920, 1, 1, 9728, "1g.10gb"),
        (81920, 3, 3, 40192, "3g.40gb"),
        (81920, 7, 7, 81152, "7g.80gb"),
        (81920, 1, 1, 19968, "1g.20gb"),
        (81559, 3, 1, 40448, "1c.3g.40gb"),  # an H100: a little less than 80 GiB
        (40960, 3, 3, 19968, "3g.20gb"),
        (143771, 1, 1, 16384, "1g.18gb"),  # an H200
        (143771, 3, 3, 71424, "3g.71gb"),
    ],
)
def test_mig_profiles_have_nvidias_names(gpu_mib, slices, compute, mib, profile):
    attributes = SimpleNamespace(gpuInstanceSliceCount=slices, computeInstanceSliceCount=compute, memorySizeMB=mib)
    assert mig_profile(attributes, gpu_mib * MIB) == profile


def ports(address, *peers, switch_links=0, clique=None):
    return NvLinkPorts(address, peers, switch_links, clique)


CLIQUE, OTHER = (bytes(16), 0), (bytes(16), 1)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (ports(A), ports(B), (0, False)),
        (ports(A, B, B, "other"), ports(B, A, A), (2, False)),
        (ports(A, B, B), ports(B, A), (1, False)),  # one end of a link is down
        (ports(A, switch_links=18), ports(B, switch_links=18), (18, True)),  # an A100 knows no clique
        (ports(A, switch_links=18), ports(B, switch_links=17), (17, True)),
        (ports(A, switch_links=18, clique=CLIQUE), ports(B, switch_links=18, clique=CLIQUE), (18, True)),
        (ports(A, switch_links=18, clique=CLIQUE), ports(B, switch_links=18, clique=OTHER), (0, False)),
        (ports(A, switch_links=18, clique=CLIQUE), ports(B, switch_links=18), (18, True)),  # its fabric comes up
        (ports(A, switch_links=18), ports(B), (0, False)),
        (ports(A, "other", switch_links=6), ports(B, switch_links=6), (0, False)),
    ],
)
def test_links_that_two_gpus_have_between_them(a, b, expected):
    assert bonded(a, b) == bonded(b, a) == expected
