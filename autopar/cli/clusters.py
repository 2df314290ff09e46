"""`autopar clusters [NAME]`: the clusters that come with autopar."""

from __future__ import annotations

import argparse
from typing import Any

from autopar.cli.json_output import add_json, print_data
from autopar.cli.parser import HelpText
from autopar.cost.hardware.cluster import cluster_names, load_cluster
from autopar.cost.hardware.describe import cluster_data, cluster_table, describe, standalone
from autopar.errors import ClusterError

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar clusters
  autopar clusters h100
  autopar clusters --toml h100 > mine.toml
  autopar clusters mine.toml
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "clusters",
        help="list the clusters that come with autopar, or describe one",
        description="List the clusters that come with autopar; with a NAME or a file, say what autopar believes of it.",
        epilog=EXAMPLES,
        formatter_class=HelpText,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="the cluster to describe: a name, or a TOML file")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--toml", action="store_true", help="print it as a file that can be edited")
    add_json(how, "clusters")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List, describe or print."""
    names = cluster_names() if arguments.name is None else (arguments.name,)
    if arguments.toml and arguments.name is None:
        raise ClusterError("--toml prints one cluster\nfix: name it, as in autopar clusters --toml h100")
    if arguments.json:
        print_data("clusters", {"clusters": [cluster_data(load_cluster(name)) for name in names]})
    elif arguments.name is None:
        print(cluster_table([load_cluster(name) for name in names]))
    elif arguments.toml:
        load_cluster(arguments.name)  # a file with mistakes is not printed
        print(standalone(arguments.name), end="")
    else:
        print(describe(load_cluster(arguments.name)))
    return 0
