//! A function whose calls are recorded: selectors are followed here, so that a call costs one crossing each way.

use hicache_ranks::audit::{Kind, Record, Value};
use pyo3::exceptions::PyException;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::errors::Result;
use crate::ranks::audit::PyAuditRecords;
use crate::ranks::field::{to_digest, to_text, to_value};

/// One step of a path.
enum Step {
    Attribute(Py<PyString>),
    Item(Py<PyAny>),
}

/// What a selector does with what the path leads to.
#[derive(Clone, Copy)]
enum Call {
    Len,
    Digest,
    Sorted,
}

/// A path that was read already: no text of it is looked at again.
struct Path {
    steps: Vec<Step>,
    call: Option<Call>,
}

/// What a path leads to.
enum Picked<'py> {
    Object(Bound<'py, PyAny>),
    Field(Value),
}

impl Path {
    fn new(py: Python<'_>, steps: Vec<(String, Py<PyAny>)>, call: Option<&str>) -> PyResult<Path> {
        let step = |(kind, key): (String, Py<PyAny>)| {
            Ok(match kind.as_str() {
                "attribute" => Step::Attribute(PyString::intern(py, key.extract(py)?).unbind()),
                _ => Step::Item(key),
            })
        };
        let call = match call {
            None => None,
            Some("len") => Some(Call::Len),
            Some("digest") => Some(Call::Digest),
            Some(_) => Some(Call::Sorted),
        };
        Ok(Path { steps: steps.into_iter().map(step).collect::<PyResult<_>>()?, call })
    }

    /// What it leads to from an object. The engine goes on, whatever a selector meets: of an exception the type
    /// is recorded.
    fn follow<'py>(&self, object: Bound<'py, PyAny>) -> PyResult<Picked<'py>> {
        let py = object.py();
        self.walk(object).or_else(|error| {
            if !error.is_instance_of::<PyException>(py) {
                return Err(error);
            }
            let name = error.get_type(py).getattr(intern!(py, "__name__"))?;
            let name = name.cast::<PyString>()?;
            Ok(Picked::Field(to_text(format!("<{}>", name.to_string_lossy()).into())))
        })
    }

    fn walk<'py>(&self, mut object: Bound<'py, PyAny>) -> PyResult<Picked<'py>> {
        static SORTED: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let py = object.py();
        for step in &self.steps {
            object = match step {
                Step::Attribute(name) => object.getattr(name.bind(py))?,
                Step::Item(key) => object.get_item(key.bind(py))?,
            };
        }
        Ok(match self.call {
            None => Picked::Object(object),
            Some(Call::Len) => Picked::Field(Value::Int(object.len()? as i64)),
            Some(Call::Digest) => Picked::Field(to_digest(&object)?),
            Some(Call::Sorted) => Picked::Object(SORTED.import(py, "builtins", "sorted")?.call1((object,))?),
        })
    }

    fn visit(&self, visit: &PyVisit<'_>) -> std::result::Result<(), PyTraverseError> {
        for step in &self.steps {
            if let Step::Item(key) = step {
                visit.call(key)?;
            }
        }
        Ok(())
    }
}

/// A parameter, and the path from there.
struct Argument {
    /// Its place among positional arguments; None for one that is only given by name.
    place: Option<usize>,
    name: Py<PyString>,
    default: Py<PyAny>,
    path: Path,
}

impl Argument {
    fn pick<'py>(&self, args: &Bound<'py, PyTuple>, named: &Bound<'py, PyDict>) -> PyResult<Picked<'py>> {
        let py = args.py();
        let object = match self.place {
            Some(place) if place < args.len() => args.get_item(place)?,
            _ => match named.get_item(self.name.bind(py))? {
                Some(object) => object,
                None => self.default.bind(py).clone(),
            },
        };
        self.path.follow(object)
    }
}

/// What is recorded of the calls of one function.
#[pyclass(frozen, name = "AuditedFunction", module = "hicache_store.ranks")]
pub(crate) struct PyAuditedFunction {
    records: Py<PyAuditRecords>,
    name: String,
    params: Vec<Argument>,
    result: Vec<Path>,
}

impl PyAuditedFunction {
    /// Everything is picked before anything is looked at, as the objects are at that moment.
    fn record(&self, stream: usize, step: u64, kind: Kind, picked: PyResult<Vec<Picked<'_>>>) -> Result<()> {
        let field = |picked| match picked {
            Picked::Object(object) => to_value(&object, 0),
            Picked::Field(field) => Ok(field),
        };
        let fields = picked?.into_iter().map(field).collect::<PyResult<_>>()?;
        self.records.get().add(stream, Record { step, kind, name: self.name.clone(), fields })
    }
}

/// Kinds and keys of steps, as `hicache_store.ranks.consensus` reads a selector.
type Steps = Vec<(String, Py<PyAny>)>;
/// Place, name and default of a parameter, the steps from there, and the call at their end.
type Selected = (Option<usize>, String, Py<PyAny>, Steps, Option<String>);

#[pymethods]
impl PyAuditedFunction {
    #[new]
    fn new(
        py: Python<'_>,
        records: Py<PyAuditRecords>,
        name: String,
        params: Vec<Selected>,
        result: Vec<(Steps, Option<String>)>,
    ) -> PyResult<Self> {
        let argument = |(place, name, default, steps, call): Selected| {
            let path = Path::new(py, steps, call.as_deref())?;
            Ok(Argument { place, name: PyString::intern(py, &name).unbind(), default, path })
        };
        let params = params.into_iter().map(argument).collect::<PyResult<_>>()?;
        let path = |(steps, call): (Steps, Option<String>)| Path::new(py, steps, call.as_deref());
        let result = result.into_iter().map(path).collect::<PyResult<_>>()?;
        Ok(PyAuditedFunction { records, name, params, result })
    }

    /// Records a call.
    #[pyo3(signature = (stream, step, args, named, /))]
    fn called(
        &self,
        stream: usize,
        step: u64,
        args: &Bound<'_, PyTuple>,
        named: &Bound<'_, PyDict>,
    ) -> Result<()> {
        let picked = self.params.iter().map(|argument| argument.pick(args, named)).collect();
        self.record(stream, step, Kind::Called, picked)
    }

    /// Records a return.
    #[pyo3(signature = (stream, step, result, /))]
    fn returned(&self, stream: usize, step: u64, result: &Bound<'_, PyAny>) -> Result<()> {
        let picked = self.result.iter().map(|path| path.follow(result.clone())).collect();
        self.record(stream, step, Kind::Returned, picked)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> std::result::Result<(), PyTraverseError> {
        visit.call(&self.records)?;
        for argument in &self.params {
            visit.call(&argument.default)?;
            argument.path.visit(&visit)?;
        }
        self.result.iter().try_for_each(|path| path.visit(&visit))
    }
}
