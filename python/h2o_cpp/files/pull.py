"""Downloading models from the Hugging Face Hub into the directory of pulled models."""

from __future__ import annotations

from pathlib import Path

from h2o_cpp.files.download import check_space, download, is_there, model_files_of
from h2o_cpp.files.hub import HubSource, hub_errors
from h2o_cpp.files.hub_requests import list_files
from h2o_cpp.files.model_files import models_directory


def pull(source: str) -> Path:
    """Download a model and return its path; for a split model, the first file. On a terminal, a
    progress bar appears.

    source: hf://org/name[/file.gguf][:TYPE][@revision].

    Files that have the Hub's content are not downloaded again; interrupted downloads continue.
    Raises as find_model does, and OSError if a checksum is wrong, the disk is full or another
    process downloads the file; ValueError for a file name that would leave the directory.
    """
    hub_source = HubSource.parse(source)
    with hub_errors(hub_source.text):
        listing = list_files(hub_source)
        remotes = model_files_of(
            hub_source, listing, models_directory(), hub_source.repository, listing.commit
        )
        missing = [each for each in remotes if not is_there(each)]
        check_space(models_directory(), missing)
        for remote in missing:
            download(remote)
    return remotes[0].path
