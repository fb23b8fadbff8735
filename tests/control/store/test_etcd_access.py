"""A real etcd with TLS, certificates of clients, and users: who is let in, and what those who are not are told."""

import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recycle.cli.main import main
from recycle.control.net.tls import TlsFiles
from recycle.control.store.etcd_access import StoreAccess
from recycle.control.store.etcd_gateway import EtcdGateway, StoreAddress, encoded
from recycle.control.store.etcd_store import EtcdStore
from recycle.control.store.protocol import StoreAway, StoreRefused, ask_until_answered
from recycle.core.errors import FileProblem, UserError
from recycle.core.files import write_secret
from tests.control.store.contract import FIRST, MakeStore, StoreContract
from tests.control.store.etcd_cluster import EtcdCluster, etcd_cluster, missing
from tests.tls_files import FOREIGN, write_tls

needs_etcd = pytest.mark.skipif(bool(missing()), reason=missing())
pytestmark = pytest.mark.timeout(120)
LEASE_S = 8.0  # nothing waits for it here, and requests have a quarter of it
USER, PASSWORD, PREFIX = "recycle", "a password", "jobs/"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return write_tls(tmp_path_factory.mktemp("tls"), "127.0.0.1")


@pytest.fixture(scope="module")
def cluster(tls: TlsFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member, whose user `USER` may read and write keys that begin with `PREFIX`."""
    with etcd_cluster(tmp_path_factory.mktemp("etcd"), 1, tls) as made:
        root = EtcdGateway([("127.0.0.1", port) for port in made.ports], 5.0, access_of(tls))
        permission = {"permType": "READWRITE", "key": encoded(PREFIX), "range_end": encoded("jobs0")}
        for path, body in (
            ("user/add", {"name": "root", "password": "of root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/add", {"name": USER, "password": PASSWORD}),
            ("role/add", {"name": "jobs"}),
            ("role/grant", {"name": "jobs", "perm": permission}),
            ("user/grant", {"user": USER, "role": "jobs"}),
            ("enable", {}),
        ):
            root.call(f"/v3/auth/{path}", body)
        yield made


def access_of(tls: TlsFiles, user: str = "", password_file: Path | None = None) -> StoreAccess:
    return StoreAccess(tls.ca, tls.cert, tls.key, user, password_file)


@pytest.fixture
def access(tls: TlsFiles, tmp_path: Path) -> StoreAccess:
    return access_of(tls, USER, write_secret(tmp_path / "password", PASSWORD))


_numbers = itertools.count()


@pytest.fixture
def make(cluster: EtcdCluster, access: StoreAccess) -> MakeStore:
    cluster.start_all()
    address, names = StoreAddress.parse(cluster.address(f"{PREFIX}{next(_numbers)}"), access), itertools.count()
    return lambda: EtcdStore(address, f"coordinator {next(names)}", LEASE_S)


@needs_etcd
class TestContract(StoreContract):
    pass


@needs_etcd
def test_a_token_that_etcd_does_not_know_any_more_is_replaced(make: MakeStore, cluster: EtcdCluster) -> None:
    store: Any = make()
    assert store.campaign() is None
    store._gateway._token = "of.somebody.else"
    store.append(FIRST)
    cluster.kill_all()
    cluster.start_all()  # members that were started again know no token
    assert ask_until_answered(store.last) == FIRST


@needs_etcd
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda access, folder: replace(access, password_file=write_secret(folder / "wrong", "wrong")),
            "invalid user ID or password",
        ),
        (lambda access, folder: replace(access, user="", password_file=None), "user name is empty|permission denied"),
        (
            lambda access, folder: replace(access, ca=None),
            "its certificate is refused: ",
        ),
    ],
    ids=["password", "no user", "no authority"],
)
def test_who_is_not_let_in_hears_why(
    change: Callable[[StoreAccess, Path], StoreAccess], says: str, cluster: EtcdCluster, access: StoreAccess, tmp_path: Path
) -> None:
    cluster.start_all()
    store = EtcdStore(StoreAddress.parse(cluster.address("jobs/x"), change(access, tmp_path)), "a coordinator", LEASE_S)
    with pytest.raises(StoreRefused, match=says):
        store.campaign()
    with pytest.raises(UserError, match="the store does not let this coordinator in"):
        ask_until_answered(store.campaign)


@needs_etcd
def test_who_shows_no_certificate_gets_no_answer(cluster: EtcdCluster, access: StoreAccess) -> None:
    cluster.start_all()
    address = StoreAddress.parse(cluster.address("jobs/x"), replace(access, cert=None, key=None))
    with pytest.raises(StoreAway, match=r"certificate|reset"):  # TLS says why, if etcd does not close the connection before
        EtcdStore(address, "a coordinator", LEASE_S).campaign()


@needs_etcd
def test_a_user_may_use_the_own_prefix_only(cluster: EtcdCluster, access: StoreAccess) -> None:
    cluster.start_all()
    store = EtcdStore(StoreAddress.parse(cluster.address("other/x"), access), "a coordinator", LEASE_S)
    with pytest.raises(StoreRefused, match="permission denied"):
        store.campaign()


@needs_etcd
def test_who_takes_a_wrong_scheme_hears_which_is_right(cluster: EtcdCluster, tmp_path: Path, tls: TlsFiles) -> None:
    cluster.start_all()
    plain = StoreAddress.parse(cluster.address("jobs/x").replace("etcds:", "etcd:"))
    with pytest.raises(StoreAway, match=r"as an etcd that uses TLS \(etcds://\)"):
        EtcdStore(plain, "a coordinator", LEASE_S).campaign()
    with etcd_cluster(tmp_path, 1) as other:
        secure = StoreAddress.parse(other.address().replace("etcd:", "etcds:"), access_of(tls))
        with pytest.raises(StoreAway, match=r"or that uses no TLS \(etcd://\)|reset"):
            EtcdStore(secure, "a coordinator", LEASE_S).campaign()


@needs_etcd
def test_a_certificate_that_is_renewed_is_used_and_one_that_is_half_written_is_not(
    cluster: EtcdCluster, access: StoreAccess, tmp_path: Path
) -> None:
    cluster.start_all()
    own = write_tls(tmp_path / "own", "127.0.0.1")
    store = EtcdStore(StoreAddress.parse(cluster.address("jobs/y"), replace(access, cert=own.cert, key=own.key)), "a", LEASE_S)
    assert store.campaign() is None
    whole = own.cert.read_bytes()
    own.cert.write_bytes(whole[:100])
    os.utime(own.cert, (1, 1))
    store.renew()
    files = write_tls(tmp_path / "foreign", "127.0.0.1", by=FOREIGN)
    own.key.write_bytes(files.key.read_bytes())
    own.cert.write_bytes(files.cert.read_bytes())
    os.utime(own.cert, (2, 2))
    with pytest.raises(StoreAway, match=r"certificate|reset"):  # an etcd that closes the connection may only be about to end
        store.renew()
    write_tls(tmp_path / "own", "127.0.0.1")
    os.utime(own.cert, (3, 3))
    store.renew()


@needs_etcd
def test_the_command_refuses_a_wrong_password_in_one_sentence(
    cluster: EtcdCluster, access: StoreAccess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.start_all()
    wrong = replace(access, password_file=write_secret(tmp_path / "wrong", "wrong"))
    words = ["--token-file", tmp_path / "token", "--out", tmp_path / "run", "--listen", "127.0.0.1:0", *wrong.flags()]
    assert main(["coordinator", *map(str, words), "--store", cluster.address("jobs/z")]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert "recycle coordinator: the store does not let this coordinator in: 127.0.0.1:" in last
    assert "invalid user ID or password" in last
    assert "wrong" not in json.dumps(last).replace(str(tmp_path), "")


def test_flags_that_do_not_fit_are_refused(tmp_path: Path, tls: TlsFiles) -> None:
    password = write_secret(tmp_path / "password", PASSWORD)
    for make, says in (
        (lambda: StoreAccess(cert=tls.cert), "give --store-cert and --store-key, or neither"),
        (lambda: StoreAccess(user="a"), "give --store-user and --store-password-file, or neither"),
        (lambda: StoreAddress.parse("etcd://h/p", StoreAccess(user="a", password_file=password)), "write etcds://"),
    ):
        with pytest.raises(UserError, match=says):
            make()


def test_a_secret_that_others_can_read_and_files_that_cannot_be_used_are_refused(tmp_path: Path, tls: TlsFiles) -> None:
    password = write_secret(tmp_path / "password", PASSWORD)
    access = access_of(tls, "a", password)
    access.check()
    password.chmod(0o644)
    with pytest.raises(FileProblem, match=r"the password in .* can be read by others on this machine: chmod 600"):
        access.check()
    with pytest.raises(FileProblem, match=r"cannot read the password in .*: No such file"):
        replace(access, password_file=tmp_path / "absent").check()
    with pytest.raises(FileProblem, match="cannot use the authority in"):
        replace(access, ca=password).check()
    with pytest.raises(FileProblem, match=r"cannot use the certificate in .* with the key in"):
        replace(access, cert=tls.ca).check()
    empty = write_secret(tmp_path / "empty", "")
    with pytest.raises(FileProblem, match="holds no password"):
        replace(access, password_file=empty).check()
