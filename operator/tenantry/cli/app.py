"""All commands under their names. Each command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tenantry.cost import IdlePolicy, Topology

from .complete import tenant_names
from .output import View

app = typer.Typer(
    name="tenantry",
    help="Serve many tenants' language models from one Kubernetes cluster.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
keys = typer.Typer(help="API keys of tenants.", no_args_is_help=True, rich_markup_mode=None)
top = typer.Typer(
    help="Who uses how much now, from the processes' own metrics. Reads the cluster of KUBECONFIG.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
adapters = typer.Typer(
    help="LoRA adapters: digests and registries.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(keys, name="keys")
app.add_typer(adapters, name="adapters")
app.add_typer(top, name="top")


class Output(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"


Folder = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="PEFT folder: adapter_config.json and adapter_model.safetensors."),
]


@keys.command("mint")
def keys_mint(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Name of the Tenant.")],
    name: Annotated[str, typer.Option(help="Name of the key within the tenant.")] = "default",
    expires_in: Annotated[str | None, typer.Option(help="Lifetime: 90d, 12h or 30m. Absent: no end.")] = None,
) -> None:
    """Make a key on this machine. Line 1: the key, shown only now. Line 2: its entry for spec.auth.apiKeys."""
    from .keys import mint_key

    key, entry = mint_key(tenant, name, expires_in)
    typer.echo(key)
    typer.echo(entry)
    typer.echo(
        "Give the first line to the client; add the second to `spec.auth.apiKeys` of the Tenant.", err=True
    )


@keys.command("rotate")
def keys_rotate(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Name of the Tenant.")],
    file: Annotated[
        Path, typer.Option("--file", "-f", help="YAML file with the Tenant; rewritten in place.")
    ],
    name: Annotated[str, typer.Option(help="Name of the key that is to end.")] = "default",
    overlap: Annotated[str, typer.Option(help="For so long both keys are valid: 7d, 12h or 30m.")] = "7d",
    expires_in: Annotated[
        str | None, typer.Option(help="Lifetime of the new key: 90d, 12h or 30m. Absent: no end.")
    ] = None,
) -> None:
    """Add a second key to a Tenant's file and give the old one an end. Prints the new key, shown only now."""
    from .rotate import rotate_file

    rotation = rotate_file(file, tenant, name, overlap=overlap, expires_in=expires_in)
    typer.echo(rotation.key)
    typer.echo(rotation.sentence, err=True)


@adapters.command("digest")
def adapters_digest(folder: Folder) -> None:
    """Print the digest under which an adapter is known everywhere."""
    from .adapters import inspect_folder

    typer.echo(inspect_folder(folder).digest)


@adapters.command("blob")
def adapters_blob(folder: Folder) -> None:
    """Write the bytes that the digest covers to stdout, for tools that sign files."""
    import sys

    from tenantry.api.digest import CONFIG_FILE, WEIGHTS_FILE, blob_chunks

    from .adapters import inspect_folder

    inspect_folder(folder)
    for chunk in blob_chunks(folder / CONFIG_FILE, folder / WEIGHTS_FILE):
        sys.stdout.buffer.write(chunk)


@adapters.command("push")
def adapters_push(
    folder: Folder,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="oci://host[:port]/repository:tag")],
    version: Annotated[
        str | None, typer.Option(help="Version of the entry; absent: the tag, when it is a SemVer.")
    ] = None,
    plain_http: Annotated[bool, typer.Option("--plain-http", help="Speak HTTP without TLS.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Let a tag that exists name other bytes.")] = False,
) -> None:
    """Push an adapter to an OCI registry and print its entry for spec.versions of the Adapter."""
    from .adapters import push_folder, version_entry, version_of

    chosen = version_of(target, version)
    adapter, source = push_folder(folder, target, plain_http=plain_http, force=force)
    typer.echo(f"pushed {adapter.digest} to {source}", err=True)
    typer.echo(version_entry(adapter, source, chosen), nl=False)


@app.command()
def promote(
    adapter: Annotated[str, typer.Argument(metavar="NAMESPACE/ADAPTER", help="The Adapter.")],
    version: Annotated[str, typer.Argument(metavar="VERSION", help="A version that the file lists.")],
    file: Annotated[
        Path, typer.Option("--file", "-f", help="YAML file with the Adapter; rewritten in place.")
    ],
) -> None:
    """Make the one-line change that lets the stable channel serve another version. Commit it to promote."""
    from .promote import promote_file

    typer.echo(promote_file(file, adapter, version))


@app.command()
def rollback(
    adapter: Annotated[str, typer.Argument(metavar="NAMESPACE/ADAPTER", help="The Adapter.")],
    file: Annotated[Path, typer.Option("--file", "-f", help="YAML file with the Adapter.")],
    to: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Absent: the highest listed one below the stable one."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Rewrite the file instead of printing a diff.")
    ] = False,
) -> None:
    """Print the one-line change that goes back to an earlier version, for `git apply`. Commit it to roll back."""
    from .rollback import rollback as run

    typer.echo(run(file, adapter, to, write=write), nl=False)


@app.command()
def cost(
    tenants: Annotated[Path, typer.Option(help="YAML or CSV: who sends how much.")],
    fleet: Annotated[Path, typer.Option(help="YAML: what a replica does and costs.")],
    idle: Annotated[IdlePolicy, typer.Option(help="Who pays for idle capacity.")] = IdlePolicy.PROPORTIONAL,
    topology: Annotated[Topology, typer.Option(help="Whose bill is divided.")] = Topology.TIERS,
    output: Annotated[Output, typer.Option("--output", "-o", help="Form of the tables.")] = Output.TABLE,
) -> None:
    """What shared and dedicated serving cost, per tenant, and where they cross. Needs no cluster."""
    from .cost import run

    typer.echo(run(tenants, fleet, idle, topology, output.value), nl=False)


@app.command()
def plan(
    file: Annotated[Path, typer.Option("--file", "-f", help="YAML with Tenants, AdapterPools, Adapters.")],
    config: Annotated[
        Path | None, typer.Option(help="The operator's configuration file; needed for Tenants.")
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Reckon with what the cluster of KUBECONFIG holds; reads only.")
    ] = False,
) -> None:
    """Print what the operator would apply for a file, and why each tenant gets its place. Needs no cluster."""
    from .cluster import Cluster
    from .plan import run

    typer.echo(run(file, config, Cluster() if cluster else None), nl=False)


Tenant = Annotated[
    str, typer.Argument(metavar="TENANT", help="Name of the Tenant.", autocompletion=tenant_names)
]
Shown = Annotated[View, typer.Option("--output", "-o", help="For people (table, wide) or for programs.")]


@app.command()
def status(
    tenant: Annotated[
        str | None,
        typer.Argument(
            metavar="[TENANT]", help="Name of the Tenant; absent: all of them.", autocompletion=tenant_names
        ),
    ] = None,
    output: Shown = View.TABLE,
) -> None:
    """Show where tenants run, what they serve and what is guaranteed. Reads the cluster of KUBECONFIG."""
    from .cluster import Cluster
    from .status import status

    typer.echo(status(Cluster(), tenant, output), nl=False)


@app.command("export")
def export_tenants() -> None:
    """Print all tenants, pools and adapters, to be applied to another cluster. Reads the cluster of KUBECONFIG."""
    from .cluster import Cluster
    from .export import export

    found = export(Cluster())
    typer.echo(found.text, nl=False)
    for note in found.notes:
        typer.echo(note, err=True)


class ReportForm(StrEnum):
    """How a report is written."""

    TEXT = "text"
    JSON = "json"
    HTML = "html"


@app.command()
def report(
    tenant: Tenant,
    output: Annotated[
        ReportForm, typer.Option("--output", "-o", help="Form of the report.")
    ] = ReportForm.TEXT,
    release: Annotated[str, typer.Option(help="Namespace of the operator.")] = "tenantry-system",
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 when there is a gap.")] = False,
) -> None:
    """What a tenant is guaranteed, with the evidence and its times, gaps shown as gaps. For auditors."""
    from .cluster import Cluster
    from .report import report

    text, gaps = report(Cluster(), tenant, output.value, release)
    typer.echo(text, nl=False)
    raise typer.Exit(1 if gaps and strict else 0)


@app.command()
def why(tenant: Tenant, output: Shown = View.TABLE) -> None:
    """Say what keeps a tenant from being served, down to its pools and adapters. Exit code 1 when something does."""
    from .cluster import Cluster
    from .status import why

    text, troubled = why(Cluster(), tenant, output)
    typer.echo(text, nl=False)
    raise typer.Exit(1 if troubled else 0)


@top.command("tenants")
def top_tenants(
    interval: Annotated[float, typer.Option(min=0.5, max=300.0, help="Seconds that are measured.")] = 5.0,
    output: Shown = View.TABLE,
) -> None:
    """Requests and tokens a second of each tenant, the busiest first."""
    from .cluster import Cluster
    from .top import tenants

    typer.echo(tenants(Cluster(), interval, output), nl=False)


@top.command("replicas")
def top_replicas(output: Shown = View.TABLE) -> None:
    """What runs and waits on each engine replica, and how full it is."""
    from .cluster import Cluster
    from .top import replicas

    typer.echo(replicas(Cluster(), output), nl=False)
