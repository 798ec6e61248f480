"""What W&B's server answers to each operation of the SDK, and what it keeps of it."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import dataclass, field
from itertools import product

import yaml

ENTITY = "tester"
_ONE_PAGE = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}


@dataclass
class Run:
    """What a run has sent: ``history`` and ``events`` by the number of the line, ``files`` by name."""

    id: str
    fields: dict = field(default_factory=dict)
    history: dict[int, dict] = field(default_factory=dict)
    summary: dict = field(default_factory=dict)
    events: dict[int, dict] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    alerts: list[dict] = field(default_factory=list)
    exit_code: int | None = None
    resumed: int = 0

    @property
    def config(self) -> dict:
        return {k: v["value"] for k, v in json.loads(self.fields.get("config") or "{}").items()}

    @property
    def rows(self) -> list[dict]:
        return [self.history[line] for line in sorted(self.history)]


class Answers:
    """An operation ``NameOfIt`` is answered by ``_on_name_of_it``, of the variables that came with it.

    Attributes:
        url: where files go.
        sweeps: what each says, and by the name of each run that was planned its parameters.
        views: workspaces and reports.
    """

    url: str

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.artifacts: dict[str, dict] = {}
        self.sweeps: dict[str, dict] = {}
        self.views: dict[str, dict] = {}
        self.projects: list[str] = []

    def run(self, ending: str) -> Run:
        """The only one whose name ends so, ``-0`` that of seed 0."""
        (found,) = (run for run in self.runs.values() if run.id.endswith(ending))
        return found

    def _run(self, name: str) -> Run:
        return self.runs.setdefault(name, Run(name))

    def _on_viewer(self, given: dict) -> dict:
        who = {"id": "u", "entity": ENTITY, "username": ENTITY, "name": ENTITY, "email": "", "flags": "{}"}
        return {"viewer": who | {"admin": False, "teams": {"edges": []}, "apiKeys": {"edges": []}}}

    def _on_upsert_bucket(self, given: dict) -> dict:
        inserted = given["name"] not in self.runs
        run = self._run(given["name"])
        run.fields |= {key: value for key, value in given.items() if value is not None}
        return {"upsertBucket": {"bucket": self._bucket(run), "inserted": inserted}}

    def _bucket(self, run: Run) -> dict:
        project = {"id": "p", "name": run.fields["project"], "entity": {"id": "e", "name": ENTITY}}
        return {
            **{"id": f"id-{run.id}", "name": run.id, "displayName": run.fields.get("displayName")},
            **{"description": None, "config": run.fields.get("config"), "sweepName": run.fields.get("sweep")},
            **{"project": project, "historyLineCount": len(run.history)},
        }

    def _on_run_resume_status(self, given: dict) -> dict:
        run = self.runs.get(given["name"])
        project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": ENTITY}}
        if run is None:
            return {"model": project | {"bucket": None}}
        run.resumed += 1
        bucket = self._bucket(run) | {
            **{"historyLineCount": len(run.history), "eventsLineCount": len(run.events), "logLineCount": 0},
            **{"historyTail": _tail(run.history), "eventsTail": _tail(run.events)},
            **{"summaryMetrics": json.dumps(run.summary), "config": run.fields.get("config"), "tags": []},
            "wandbConfig": json.dumps({"t": 1}),
        }
        return {"model": project | {"bucket": bucket}}

    def _on_organization_core_weave_organization_id(self, given: dict) -> dict:
        return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}

    def _on_notify_scriptable_run_alert(self, given: dict) -> dict:
        self._run(given["runName"]).alerts.append(given)
        return {"notifyScriptableRunAlert": {"success": True}}

    def _on_create_run_files(self, given: dict) -> dict:
        files = [{"name": n, "uploadUrl": self._upload(given["run"], n)} for n in given["files"]]
        return {"createRunFiles": {"runID": f"id-{given['run']}", "uploadHeaders": [], "files": files}}

    def _on_server_features_query(self, given: dict) -> dict:
        return {"serverInfo": {"features": []}}

    def _on_artifact_type(self, given: dict) -> dict:
        return {"project": {"artifact": None}}

    def _on_create_artifact(self, given: dict) -> dict:
        name = f"artifact-{given['artifactCollectionName']}"
        self.artifacts[name] = {"asked": given, "files": {}, "committed": False}
        made = {"id": name, "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": made}}

    def _on_create_artifact_manifest(self, given: dict) -> dict:
        file = {"id": "f", "uploadUrl": self._upload(given["artifactID"], given["name"]), "uploadHeaders": []}
        return {"createArtifactManifest": {"artifactManifest": {"id": "m", "file": file}}}

    def _on_create_artifact_files(self, given: dict) -> dict:
        none = {"storagePath": None, "uploadHeaders": [], "uploadMultipartUrls": None}
        files = [(f["artifactID"], f["name"]) for f in given["artifactFiles"]]
        nodes = [none | {"uploadUrl": self._upload(i, n), "artifact": {"id": i}} for i, n in files]
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def _on_commit_artifact(self, given: dict) -> dict:
        self.artifacts[given["artifactID"]]["committed"] = True
        return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": "d"}}}

    def _on_upsert_sweep(self, given: dict) -> dict:
        sweep = {"name": f"sweep-{len(self.sweeps)}", "config": given["config"], "runs": {}}
        self.sweeps[sweep["name"]] = sweep
        project = {"id": "p", "name": given["projectName"], "entity": {"id": "e", "name": ENTITY}}
        return {"upsertSweep": {"sweep": sweep | {"project": project}, "configValidationWarnings": []}}

    def _on_sweep_with_runs(self, given: dict) -> dict:
        sweep = self.sweeps[given["sweep"]]
        return {"project": {"sweep": {"config": sweep["config"], "runs": {"edges": []}}}}

    def _on_create_agent(self, given: dict) -> dict:
        return {"createAgent": {"agent": {"id": given["sweep"]}}}

    def _on_heartbeat(self, given: dict) -> dict:
        """Plans the next run of the grid where the agent has none at work, and lets it end after the last."""
        sweep, at_work = self.sweeps[given["id"]], json.loads(given["runState"])
        told = yaml.safe_load(sweep["config"])
        names = list(told["parameters"])
        grid = list(product(*(told["parameters"][name]["values"] for name in names)))
        commands = []
        if not at_work and len(sweep["runs"]) == len(grid):
            commands = [{"type": "exit"}]
        elif not at_work:
            run, values = f"planned-{len(sweep['runs'])}", grid[len(sweep["runs"])]
            sweep["runs"][run] = dict(zip(names, values, strict=True))
            arguments = {name: {"value": value} for name, value in sweep["runs"][run].items()}
            commands = [{"type": "run", "run_id": run, "program": told["program"], "args": arguments}]
        return {"agentHeartbeat": {"agent": {"id": given["id"]}, "commands": json.dumps(commands)}}

    def _on_get_default_entity(self, given: dict) -> dict:
        return {"viewer": {"id": "u", "entity": ENTITY}}

    def _keep_view(self, given: dict) -> dict:
        """A workspace or report; in the place of an earlier one where it has its id."""
        view = {"id": given.get("id") or b64encode(b"View:%d" % len(self.views)).decode()} | {
            k: v for k, v in given.items() if v
        }
        self.views[view["id"]] = view
        return {"upsertView": {"view": self._seen(view), "inserted": True}}

    _on_upsert_view2 = _on_upsert_view = _keep_view

    def _seen(self, view: dict) -> dict:
        made = dict.fromkeys(("createdAt", "updatedAt"), "2026-01-01T00:00:00Z")
        return made | view | {"project": self._project(view["projectName"])}

    def _on_view(self, given: dict) -> dict:
        found = [self._seen(view) for view in self.views.values() if view["name"] == given["viewName"]]
        return {"project": {"allViews": {"edges": [{"node": view} for view in found]}}}

    def _on_specific_report(self, given: dict) -> dict:
        return {"view": self._seen(self.views[given["reportId"]])}

    def _on_get_projects(self, given: dict) -> dict:
        return {
            "models": {"pageInfo": _ONE_PAGE, "edges": [{"node": self._project(n)} for n in self.projects]}
        }

    def _on_create_project(self, given: dict) -> dict:
        self.projects.append(given["name"])
        return {"result": {"project": self._project(given["name"]), "inserted": True}}

    def _project(self, name: str) -> dict:
        made = "2026-01-01T00:00:00Z"
        about = {"id": "p", "name": name, "entityName": ENTITY, "createdAt": made, "isBenchmark": False}
        return about | {"__typename": "Project", "user": None}

    def _upload(self, owner: str, name: str) -> str:
        return f"{self.url}/upload/{owner}/{name}"


def _tail(lines: dict[int, dict]) -> str:
    """The last line, as the SDK reads it: JSON of a list of JSON."""
    return json.dumps([json.dumps(lines[max(lines)])] if lines else [])
