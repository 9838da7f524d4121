"""The hints about a run, from the rows of its folder."""

from pretrain.analysis.report.reduce import kept_evaluations, kept_rows
from pretrain.analysis.report.run_table import Columns, RunTable
from pretrain.monitor.curve import EVALUATION_KEYS, KEYS, Curve, Facts, Hint, hints_of_extensions


def hints_of(table: RunTable) -> list[Hint]:
    """Return what the curve of a run shows: the most important first; none if there are no rows.

    Steps that were trained again later do not count.
    """
    valid, kept = table.evaluations.get("valid", Columns()), kept_rows(table.training)
    newest = kept_evaluations(valid, table.training)
    curve = Curve({key: table.training.column(key)[kept] for key in KEYS},
                  {key: valid.column(key)[newest] for key in EVALUATION_KEYS})
    return hints_of_extensions(curve, Facts.of_record(table.starts[-1] if table.starts else {}))
