"""Who stands by says so at the store where the hosts meet, as long as it does."""

from jitckpt.hosts.signed import Signature
from jitckpt.hosts.standbys import Standby, announced
from jitckpt.hosts.store_server import store_at
from jitckpt.hosts.waiting_places import AtStore

HERE = "127.0.0.1"
PATIENCE = 20.0


def test_one_that_has_taken_a_place_is_none_of_those_that_stand_by() -> None:
    """Else ranks would be dumped for a host that is not there, before anybody is waited for."""
    store, signature = store_at(HERE), Signature("job", b"0123456789abcdef")
    one, other = Standby(HERE, 1), Standby(HERE, 2, unpacks=True)
    places = [
        AtStore(f"{HERE}:{store.port}", signature, timeout=PATIENCE, silence=PATIENCE) for _ in range(2)
    ]
    for place, own in zip(places, (one, other), strict=True):
        place.announce(own)
    assert announced(store, signature) == [other, one]
    assert places[0].others() == [other]
    places[1].take_place("")
    assert announced(store, signature) == [one]
    assert places[1].others() == [one]
