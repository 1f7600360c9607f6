# A query to an application of the server, from its arguments to its answer: the policy's choice,
# the look-up in the cache, tasks for what is not there, the combination, the counts, and the entry
# that feedback needs. It calls no Python for the built-in policies (selection.pxd), as long as
# every model that a query calls answers, and nothing else wants to see the query.
#
# What is not simple is left to Python (python/clipper/serving/query/processor.py), which gives the
# same answers: arrays of several models, floats beside labels, qualifiers with a decider.
#
# Threads: any, with the GIL.
from cpython.object cimport PyObject

from clipper_core.application.deciding cimport Deciding
from clipper_core.application.output_means cimport OutputMeans
from clipper_core.application.roles cimport Roles
from clipper_core.application.selection cimport (
    TASKS_MAX, Combination, Outputs, Selection, StateView,
)
from clipper_core.engine.model cimport Model
from clipper_core.learning.answer_counts cimport AnswerCounts, SideCounts
from clipper_core.learning.answer_window cimport AnswerOwner, AnswerWindow
from clipper_core.learning.class_evidence cimport ClassEvidence
from clipper_core.learning.feedback_update cimport CONTEXT_MAX
from clipper_core.results.answer cimport Answer
from clipper_core.results.decider cimport RulingData
from clipper_core.results.future cimport Future
from clipper_core.runtime.histogram cimport Counter, Gauge
from clipper_core.runtime.machine cimport u8, u32, u64
from clipper_core.runtime.row_hash cimport Key

cdef struct Rows:               # of a query, task by task
    const void* data[TASKS_MAX]
    u64[TASKS_MAX] sizes
    Key[TASKS_MAX] keys
    u64 hits                    # bit set of the tasks whose outputs are cached

cdef struct Asked:              # what a policy, and the roles of models, chose for a query
    double probability          # of the choice; NaN: it was certain
    u32 chosen                  # the place of the model, if one is called; else how many there are
    u64 watching                # bit set of the observers by their roles
    bint shadowed               # whether the models that the policy did not choose observe it too

cdef struct Decision:           # of a decider about outputs that are cached
    const void* row             # of all models
    u64 nbytes
    u64 salt
    u64 known                   # bit set of the ranks whose outputs were looked up
    Outputs outputs             # by rank; each of them has a reference
    RulingData ruling

cdef struct Context:            # of a query
    double[CONTEXT_MAX] features
    u32 n

cdef struct Ending:             # how a query ended
    u64 number                  # in the id of its answer
    u64 seen                    # with a decider: bit set of the tasks that had arrived
    double probability          # of the model that was chosen; NaN: it was certain
    u32 took_us
    u64 missing                 # bit set of the tasks without a prediction in time
    u8 step                     # of the decider
    const double* context       # [features]: that feedback needs
    u32 features
    PyObject* thresholds        # of prediction sets, borrowed; only where there are some

# -- A query until its answer is read: `Future.extra`.
cdef class ApplicationQuery:
    cdef readonly Application application
    cdef readonly tuple models  # that were called, task by task
    cdef readonly str user
    cdef readonly str id        # the caller's own
    cdef tuple features         # that its policy read; None: none
    cdef object learned         # the state that the query was planned by; None: the policy's first
    cdef tuple observers        # models that see the query and do not answer; None: there are none
    cdef tuple watched          # (model, future) of those of them that were queried
    cdef Asked asked
    cdef Deciding deciding      # None: all models are waited for
    cdef u64 slo_us             # of one with a decider: until its decision

cdef class Application:
    cdef readonly object resolved
    cdef readonly Selection selection
    cdef readonly u64 slo_us
    cdef readonly u32 priority  # of queries that name none
    cdef tuple models           # sorted, as the cores are
    cdef tuple primaries        # those that the policy calls, or chooses one of
    cdef list cores
    cdef list called            # for a query to one model: a tuple of it, by place
    cdef list owners            # of answers, by place; the last one: of all models
    cdef list quick             # queries that are answered at once, as `owners`; None: to be made
    cdef object learner, slowest, latest
    cdef Gauge is_teaching, bar_us
    cdef object viewed          # a state, of which this is the view
    cdef StateView last_view
    cdef object plan_type, by_python, opened
    cdef object uniform_of      # returns the random number of a caller's own id
    cdef list links             # by place: is told that a query uses the model; None: of no mesh
    cdef Roles roles            # None: no model has another than to answer
    cdef object observing       # queries observers, and compares what they say
    cdef object compare         # compares the outputs of many models
    cdef tuple odds             # of the primaries together, where challengers take a share
    cdef object decoys          # are told of queries and of their answers; None: there are none
    cdef object kept            # is told of each answer, by number; None: nobody is
    cdef AnswerWindow window
    cdef AnswerCounts counts
    cdef SideCounts side        # of a rollout; None: there is none
    cdef OutputMeans means      # None: missing numbers are left out
    cdef Counter queries, decided
    cdef list output_means      # by place
    cdef u32[TASKS_MAX] places  # of the models in `counts`
    cdef u32[TASKS_MAX] counted     # the same of `primaries`
    cdef u32[TASKS_MAX] single  # each place by itself
    cdef u32[TASKS_MAX] order   # of a model among `primaries`, by its place
    cdef str node
    cdef double confidence_min
    cdef object defaults
    cdef Counter undecided      # answers by no step of the decider
    cdef object orders          # of its decider; None: all models are waited for
    cdef object decided_for     # the state that `deciding` is for
    cdef Deciding deciding
    cdef ApplicationQuery decided_query     # of a query that its decider answers at once
    cdef bint has_contexts      # of users, in a table that Python reads
    cdef bint shares_rows       # all models read the same row from an input
    cdef bint mixed             # they are of several engines
    cdef bint is_similar        # a model answers with predictions for similar inputs
    cdef u64 draws

    # Schedule a query. Return None if Python has to. user: "" for nobody's. id: the caller's own.
    # features: of the query, as `features_in` returns them; None: none. band: of all its rows.
    # Return the band of a query with this priority; None: it has the application's.
    cdef u32 band_for(self, object priority) except? 0xFFFFFFFF
    cdef Future schedule(self, object x, str user, u64 slo_us, u64 salt, str id, tuple features,
                         u32 band)
    # The same for a row that has been read; it is only used during the call.
    cdef Future schedule_row(self, const void* row, u64 nbytes, str user, u64 slo_us, str id,
                             u32 band)
    cdef Future _scheduled(self, object x, const void* given, u64 nbytes, str user, u64 slo_us,
                           u64 salt, str id, tuple features, u32 band)
    # Decide by a query's number what its roles make of it. Return the number that is the policy's.
    cdef double draw(self, double uniform, Asked* asked) noexcept
    # Return the observers of a query; None: there are none.
    cdef tuple observers_of(self, const Asked* asked)
    # Have the query observed. Return (model, future) of the observers that were queried.
    cdef tuple watch(self, tuple observers, object x, u64 slo_us, u64 salt)
    cdef list make_quick(self)
    cdef object state_of(self, str user)
    cdef object thresholds_of(self, object state)
    cdef Future by_decider(self, object x, const void* given, u64 nbytes, u64 slo_us, u64 salt,
                           u32 band, const Asked* asked, str user, str id, object state,
                           const StateView* view)
    # Return what is known of a query until the decider has an answer.
    cdef ApplicationQuery query_for(self, Deciding deciding, u64 slo_us, str user, str id,
                                    object state)
    # query: of one that is observed, else None.  x: its input.
    cdef Future decide_at_once(self, Deciding deciding, Decision* decision, u64 slo_us,
                               ApplicationQuery query, object x, str user, str id,
                               const StateView* view)
    cdef Future call_models(self, Deciding deciding, object owner, const void* row, u64 nbytes,
                            u64 slo_us, u64 salt, u32 band, ApplicationQuery query, object x)
    cdef Deciding deciding_of(self, object state)
    cdef bint find_decision(self, Deciding deciding, u64 time_us, Decision* decision) noexcept
    cdef bint find_output(self, Model model, u32 rank, Decision* decision) noexcept
    cdef Future answer_decided(self, Deciding deciding, Decision* decision, ApplicationQuery query,
                               str user, str id, const StateView* view)
    cdef bint view_of(self, object state, StateView* view) except -1
    cdef Future look_up(self, object x, const void* given, u64 nbytes, u64 slo_us, u64 salt,
                        u32 band, const Asked* asked, str user, str id, tuple features,
                        object state, const StateView* view)
    cdef int touch(self, const u32* places, u32 n) except -1
    cdef void find(self, Rows* rows, Outputs* outputs, u64 salt) noexcept
    # Return the places of the models that a query calls.
    cdef const u32* places_of(self, u32 chosen) noexcept
    cdef ApplicationQuery query_of(self, const Asked* asked, str user, str id, tuple features,
                                   object state)
    cdef Future submit(self, Rows* rows, object row, list more, Outputs* outputs, u64 slo_us,
                       u64 salt, u32 band, ApplicationQuery query)
    cdef Future answer_later(self, Outputs* outputs, ApplicationQuery query)
    cdef void collect(self, Future future, ApplicationQuery query, Outputs* outputs,
                      Ending* ending) noexcept
    cdef Answer finish_decided(self, Future future, ApplicationQuery query, Ending* ending,
                               const StateView* view)
    cdef void find_missing(self, Future future, ApplicationQuery query, Ending* ending) noexcept
    cdef Answer answer(self, Future future, Outputs* outputs, ApplicationQuery query,
                       Ending* ending, str user, str id, const StateView* state)
    cdef Answer answer_qualified(self, Future future, Outputs* outputs, ApplicationQuery query,
                                 Ending* ending, str user, str id, const StateView* state)
    cdef dict predictions_of(self, const Outputs* outputs)
    cdef object plan_of(self, ApplicationQuery query, double probability, tuple features)
    cdef bint read_classes(self, Outputs* outputs, dict arrived, ClassEvidence* named) except -1
    cdef Answer end(self, Future future, Outputs* outputs, const Combination* found,
                    ApplicationQuery query, const Ending* ending, str user, str id, dict arrived,
                    tuple held)
    # Return the prediction set of a combination.
    cdef tuple make_set(self, const StateView* state, const Outputs* outputs,
                         const Combination* found, const Ending* ending)
    cdef int count_default(self, Future future, const Outputs* outputs,
                           const Combination* found) except -1
    cdef int count_missing(self, Future future, ApplicationQuery query,
                           const Ending* ending) except -1
    cdef str why_nothing(self, Future future, ApplicationQuery query, const Ending* ending,
                         const Outputs* outputs)
    cdef int add_to_means(self, Outputs* outputs) except -1
    cdef void fill_in(self, const Outputs* outputs, const StateView* state,
                      Combination* found) noexcept
    cdef int look_at_slowest(self, Future future, tuple models, u32 took_us,
                             Answer answer) except -1
    cdef double uniform(self) noexcept

# Return the context that a caller gives as a tuple of floats; None if Python has to look at it.
cdef tuple features_in(object context)

# -- The applications of a server by name, for queries.
cdef class ApplicationTable:
    cdef dict by_name

    cdef Application application(self, object name)
    # Return the future of a request; None if Python has to schedule it.
    cdef Future scheduled(self, object request)

# -- The part of a server that schedules requests.
cdef class RequestScheduler:
    cdef ApplicationTable requests
    cdef object other_requests  # schedules requests in Python

# -- The part of an application's handle that schedules queries and takes feedback.
cdef class QueryHandle:
    cdef readonly str name
    cdef ApplicationTable table
    cdef double slo_ms_max
    cdef object others          # schedules queries, and takes feedback, in Python
    cdef dict seen              # the applications at the last query
    cdef Application found      # its own among them; None: there is none

    cdef Application application(self)
    cdef u64 _slo_us(self, object slo_ms) except? 0
