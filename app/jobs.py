"""Show long work on pages: started or found, with its progress and its result. The queue is `featcal.server`."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import page_end, state
from app.selection import OPTIONS
from featcal.calibration.calibrate import CalibrationResult
from featcal.evaluation.evaluate import Scores
from featcal.figures.names import plain, plain_lines
from featcal.server import kinds
from featcal.server.lengths import is_long, seconds_to_make, seconds_to_score
from featcal.server.manager import ensure_manager
from featcal.server.orders import order, submit
from featcal.server.queue import CANCELLED, DIED, DONE, FAILED, QUEUED, RUNNING, Job, JobOrder, Queue
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError
from featcal.system.formatting import duration, exactly, shorten
from featcal.system.progress import Progress
from featcal.system.sandbox import server_rules, without_places

LINES = 60
"""Number of lines at the end of a log that are shown."""
ENDED = 20
"""Number of ended jobs that are listed."""
NAMES = {
    "calibrate": "Calibrate",
    "scores": "Score",
    "sweep": "Sweep",
    "report": "Report",
    "compare": "Measure methods",
    "select": "Find good options",
}
"""Display names of kinds of jobs; other kinds are shown by their own."""
PIECEWISE = ("sweep", "compare", "select")
"""Kinds of jobs whose finished pieces are reused."""
ICONS = {
    QUEUED: ":material/hourglass_empty:",
    RUNNING: ":material/progress_activity:",
    DONE: ":material/check_circle:",
    FAILED: ":material/error:",
    CANCELLED: ":material/cancel:",
    DIED: ":material/skull:",
}
_VISITOR = "visitor"


def ensure(kind: str, args: Mapping[str, Any], seconds: float, *, at_once: bool = False) -> dict[str, Any] | None:
    """Return the document of a job on the selected suite, or show its progress or a button that starts it.

    If the result is None the page has nothing to show yet; it reruns when the job has ended.

    Args:
        kind, args: as `featcal.server.kinds` has them.
        seconds: estimated time.
        at_once: start without a button, because the visitor has already asked for it.

    Raises:
        InputError: this machine cannot store jobs.
    """
    queue = Queue()
    wanted = _order(kind, args)
    document = queue.result(wanted)
    if document is not None:
        return document
    job = queue.find(wanted)
    if job is None or job.is_over:
        again = job is not None and job.state != DONE  # one that is done, its result removed, never was
        if job is not None and again:
            _show_end(job)
        if (again or not at_once) and not _ask(wanted, seconds, again):
            return None
        job = submit(queue, wanted, visitor())
    _follow(job.id)
    return None


def follow_jobs(kind: str, args: Mapping[str, Any], start: bool, left: bool = True) -> None:
    """Show the progress of every job of a kind on the selected suite, and the end of the job with these arguments if it
    left no result; for work whose results are stored elsewhere. The page reruns as pieces are finished, and when a job
    has ended.

    Args:
        start: submit the job with these arguments now.
        left: whether a part of it is still missing, so that its end should be shown.

    Raises:
        InputError: this machine cannot store jobs.
    """
    queue, wanted = Queue(), _order(kind, args)
    if start:
        submit(queue, wanted, visitor())
    own, asked = _own_jobs(queue), queue.find(wanted)
    for job in [*own, *([asked] if asked and asked not in own else [])]:
        if not job.is_over and (job.order.kind, job.order.suite) == (kind, wanted.suite):
            _follow(job.id, job.done)
    if left and asked is not None and asked.is_over and asked.state != DONE:
        _show_end(asked)


def is_unfinished(kind: str, args: Mapping[str, Any]) -> bool:
    """Say whether a job for this on the selected suite is queued or running; False if jobs cannot be stored."""
    wanted = _order(kind, args)
    try:
        job = Queue().find(wanted)
    except InputError:
        return False
    return job is not None and not job.is_over


def _ask(wanted: JobOrder, seconds: float, again: bool) -> bool:
    """Draw the button that starts an order, and say whether it was pressed; once pressed it disappears."""
    place = st.empty()
    label = "Start again" if again else "Start"
    note = "Runs as a background job: other pages stay usable, and it continues when you close this one."
    with place.container():
        st.markdown(f"**{job_title(wanted)}** takes about {duration(seconds)} on this machine.")
        pressed = st.button(
            label, type="primary", icon=":material/play_arrow:", help=note, key=f"start-{wanted.key[:12]}"
        )
    if pressed:
        place.empty()
    return pressed


def ensure_calibrated(session: Session, model: ModelRef, progress: Progress) -> None:
    """Make sure that the session has this calibrated model. If that takes long a job makes it, and the page ends with
    the job's progress."""
    config, start = model.require_calibration()

    def make() -> CalibrationResult:
        document = ensure("calibrate", _calibrate_args(config, start), seconds)
        if document is None:
            page_end.end_page()
        return kinds.calibration_from(session.fit.family_with(start), config, document)

    seconds = seconds_to_make(session, model)
    if is_long(session, seconds):
        session.fit.adopt_calibration(model, make, kinds.is_gone)
    else:
        session.fit.calibrate(model, progress)


def is_quick_or_done(session: Session, model: ModelRef) -> bool:
    """Say whether `ensure_calibrated` would return within a moment."""
    if not is_long(session, seconds_to_make(session, model)):
        return True
    with suppress(InputError):  # jobs cannot be kept on this machine
        return Queue().result(_order("calibrate", _calibrate_args(*model.require_calibration()))) is not None
    return False


def _calibrate_args(config: CalibrationConfig, start: ModelRef) -> dict[str, Any]:
    """Return the arguments of a job that calibrates the suite's merged model, or another start."""
    return {"options": kinds.job_options(config), **model_argument(start)}


def model_argument(start: ModelRef) -> dict[str, str]:
    """Return the argument of a job that calibrates another start than the suite's merged model."""
    return {} if start.kind == "merged" else {"model": start.name}


def finished_scores(
    session: Session, model: ModelRef, view: EvaluationSamples, progress: Progress, *, at_once: bool = False
) -> Scores | None:
    """Return scores of a model on a split; None until their job is done, if they take long."""
    seconds = seconds_to_score(session, view)
    if session.measure.has_scores(model, view) or not is_long(session, seconds):
        return session.measure.scores(model, view, progress)
    document = ensure("scores", _score_args(session, model, view), seconds, at_once=at_once)
    if document is None:
        return None
    return session.measure.adopt_scores(model, view, kinds.scores_from(document))


def finished_report(
    session: Session, models: Collection[ModelRef], on: EvaluationSamples, seconds: float
) -> bytes | None:
    """Return the report of a job; None until it is written."""
    args = {
        "models": [model.name for model in models],
        **_find_made(*models),
        **asdict(on),
        "split": on.split or session.split,
    }
    document = ensure("report", args, seconds)
    return None if document is None else without_places(Path(document["out"]).read_bytes().decode()).encode()


def has_scores_job(session: Session, model: ModelRef, view: EvaluationSamples) -> bool:
    """Say whether `finished_scores` has something to show: cached scores, or a job for them."""
    return session.measure.has_scores(model, view) or has_job("scores", _score_args(session, model, view))


def has_job(kind: str, args: Mapping[str, Any]) -> bool:
    """Say whether there is or was a job for this on the selected suite; False if jobs cannot be stored."""
    wanted = _order(kind, args)
    try:
        return Queue().find(wanted) is not None
    except InputError:
        return False


def _score_args(session: Session, model: ModelRef, view: EvaluationSamples) -> dict[str, Any]:
    return {"model": model.name, **_find_made(model), **asdict(view), "split": view.split or session.split}


def _order(kind: str, args: Mapping[str, Any]) -> JobOrder:
    """Return a job's order on the selected suite."""
    return order(kind, state.suite_reference(), args, state.stamp())


def _find_made(*models: ModelRef) -> dict[str, dict[str, str]]:
    """Return the argument that says which of the models jobs have calibrated: their folders by name."""
    found = dict[str, str]()
    for model in models:
        if model.config is not None and model.of is not None:
            made = Queue().result(_order("calibrate", _calibrate_args(model.config, model.of)))
            found |= {} if made is None else {model.name: str(made["out"])}
    return {"made": found} if found else {}


def visitor() -> str:
    """Return the visitor's name for turns in the queue; it survives a reload if the browser has streamlit's cookie."""
    cookie = st.context.cookies.get("_streamlit_xsrf")
    if isinstance(cookie, str):
        # Hashed: the queue's file is read by others, and the cookie itself is a secret.
        return hashlib.sha256(cookie.encode()).hexdigest()[:16]
    return str(st.session_state.setdefault(_VISITOR, uuid.uuid4().hex[:16]))


@st.fragment(run_every="1s")
def _follow(identity: int, pieces: int | None = None) -> None:
    """Redraw a job's card every second until it has ended; then rerun the page.

    Args:
        pieces: number of finished pieces on the page, which is redrawn about twenty times while others finish. None if
            it shows none.
    """
    queue = Queue()
    job = queue.get(identity)
    if job is None or job.is_over or (pieces is not None and job.done >= pieces + max(1, job.total // 20)):
        st.rerun()
    ensure_manager(queue)
    _card(queue, job)


def _card(queue: Queue, job: Job, place: str = "") -> None:
    """Draw a job with its progress, remaining time, a cancel button, and its log.

    Args:
        place: distinguishes several cards of a job on a page.
    """
    with st.container(border=True, key=f"{place}job-{job.id}"):
        st.markdown(f"**{job_title(job.order)}**")
        share = job.done / job.total if job.total else 0.0
        st.progress(share, text=progress_line(job, time.time(), queue))
        left, right = st.columns([1, 4], vertical_alignment="top")
        if server_rules() is None or job.visitor == visitor():
            left.button(
                "Cancel", key=f"{place}cancel-{job.id}", icon=":material/cancel:", on_click=queue.cancel, args=(job.id,)
            )
        with right:
            _log(job)


def progress_line(job: Job, now: float, queue: Queue) -> str:
    """Describe the state of a job in one line."""
    if job.state == QUEUED:
        others = sum(not one.is_over for one in queue.jobs()) - 1
        return f"in line; {others} other {'job' if others == 1 else 'jobs'} unfinished, visitors take turns"
    if queue.is_cancel_requested(job.id):
        return "ending …"
    so_far = duration(now - (job.started or now))
    if not job.total:
        return f"starting: libraries and models are being read, {so_far} so far"
    left = job.seconds_left(now)
    rest = "" if left is None or job.done == job.total else f", about {duration(left)} left"
    step = "block " if job.order.kind == "calibrate" else ""
    here = f"{step}{min(job.done + 1, job.total)} of {job.total}" if job.done < job.total else "writing the result"
    return f"{plain(job.label)}: {here}, {so_far} so far{rest}"


def job_title(order: JobOrder) -> str:
    """Name the computation, for Markdown."""
    file = Path(order.suite)
    suite = file.parent.name if file.name == "suite.yaml" else file.name.removesuffix(".yaml").removesuffix(".yml")
    options = {**order.args.get("options", order.args), "model": order.args.get("model")}
    recipe = options.get("recipe")
    symbols = {name: one.symbol for name, one in OPTIONS.items() if one.symbol and recipe in (None, *one.recipes)}
    numbers = {"recipe": "", **symbols, "augment": "copies", "model": "model", "split": "split"}
    values = {name: options[name] for name in numbers if options.get(name) not in (None, *([0] * (name == "augment")))}
    settings = [f"{numbers[name]} {_format_value(value)}".strip() for name, value in values.items()]
    return plain(" · ".join(shorten(one, 60) for one in [NAMES.get(order.kind, order.kind), suite, *settings]))


def _format_value(value: object) -> str:
    """Format a value as the sliders do."""
    return exactly(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _show_end(job: Job) -> None:
    """Show the end of a job without a result, in the library's own words, with its log."""
    words = plain_lines(job.message)
    if job.state == CANCELLED:
        kept = "nothing is kept"
        if job.order.kind in PIECEWISE:
            kept = "finished parts are kept, and a new start continues there"
        st.info(f"This was cancelled; {kept}.", icon=ICONS[CANCELLED])
    elif job.state == DIED:
        st.warning(f"This died: {words}", icon=ICONS[DIED])
    else:
        st.error(words, icon=ICONS[FAILED])
    _log(job)


def _log(job: Job) -> None:
    with st.expander("Log", icon=":material/terminal:"):
        _tail(job)


def _tail(job: Job) -> None:
    """Show the last lines of a job's log."""
    if not job.log.is_file():
        st.caption("Nothing yet.")
        return
    lines = without_places(job.log.read_text(encoding="utf-8", errors="replace")).splitlines()
    st.code("\n".join(lines[-LINES:]), language=None, wrap_lines=True)


def badge(place: DeltaGenerator) -> None:
    """Draw a button that shows the running job, and opens the queue and the ended jobs."""
    try:
        busy = not all(job.is_over for job in _own_jobs(Queue()))
    except InputError:  # jobs cannot be kept on this machine
        return
    with place:
        st.fragment(_badge, run_every="1s" if busy else None)(busy)


def _badge(busy: bool) -> None:
    jobs = [job for job in _own_jobs(Queue()) if not job.is_over]
    label, icon = "Jobs", ":material/pending_actions:"
    if jobs:
        first, count = jobs[0], f"{len(jobs)} job{'s' * (len(jobs) > 1)}"
        share = f" {100 * first.done / first.total:.0f}\u00a0%" if first.total else ""
        label, icon = f"{count}{share}", ICONS[RUNNING]
    # What it opens is drawn when it is open: a long queue would cost every page.
    opened = st.popover(label, icon=icon, key="jobs", on_change="rerun", type="tertiary", width="content")
    if opened.open:
        with opened:
            st.caption(
                "Long computations run as background jobs, one at a time; they continue when this page is closed."
            )
            _listing(busy)
    elif busy and not jobs:
        st.rerun()  # nothing will change any more: no drawing every second


def _own_jobs(queue: Queue) -> list[Job]:
    """Return all jobs, on a shared server those of this visitor."""
    return [job for job in queue.jobs() if server_rules() is None or job.visitor == visitor()]


def _listing(busy: bool) -> None:
    queue = Queue()
    ensure_manager(queue)
    jobs = _own_jobs(queue)
    if busy and all(job.is_over for job in jobs):
        st.rerun()
    for job in jobs:
        if not job.is_over:
            _card(queue, job, "listed-")
    if all(job.is_over for job in jobs):
        st.info("Nothing is running or in line.", icon=":material/bedtime:")
    ended = [job for job in jobs if job.is_over]
    if ended:
        st.markdown("**Ended**")
    for job in ended[:ENDED]:
        took = "" if job.started is None else f" · {duration((job.ended or job.started) - job.started)}"
        with st.expander(f"{job_title(job.order)} · {job.state}{took}", icon=ICONS[job.state]):
            if job.message:
                st.text(without_places(job.message))
            files = "" if server_rules() else f"; files in {job.folder}"
            st.caption(plain(f"Asked for {clock_time(job.asked)}{files}"))
            _tail(job)
            st.button("Remove with its result", key=f"remove-{job.id}", on_click=queue.forget, args=(job.id,))


def clock_time(moment: float) -> str:
    """Format a moment on this machine's clock."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
