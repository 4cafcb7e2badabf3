//! A model's matrices and vectors, from a GGUF file or from safetensors, under the names of one of the two.
//!
//! Owns the weights. Invariant: a matrix or vector that exists has the shape that the configuration asks for, so the
//! forward pass checks none.

use std::path::Path;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor, ggml_file::qtensor_from_ggml, gguf_file};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Module, Tensor};

use crate::error::{Error, Result};

/// How weights are held in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// As the file has them: quantised tensors stay quantised, safetensors become f32.
    #[default]
    File,
    /// Everything as f32.
    F32,
    /// Matrices of safetensors quantised to q8_0 while loading (a quarter of f32); a GGUF's stay as they are.
    Q8,
}

/// A matrix `[rows, cols]` that maps `cols` inputs to `rows` outputs.
#[derive(Debug, Clone)]
pub struct Matrix(QMatMul);

impl Matrix {
    /// `x`, `[tokens, cols]`, times the transposed matrix: `[tokens][rows]`.
    pub fn apply(&self, x: &Tensor) -> Result<Vec<f32>> {
        Ok(self.0.forward(x)?.flatten_all()?.to_vec1()?)
    }
}

/// The table of token embeddings, of which a step reads a few rows; quantised rows are widened as they are read.
#[derive(Debug, Clone)]
pub struct Embedding {
    table: Table,
    vocab: usize,
    hidden: usize,
}

#[derive(Debug, Clone)]
enum Table {
    Plain(Tensor),
    Quantised(Arc<QTensor>),
}

impl Embedding {
    /// The embeddings of `tokens`, `[token][hidden]`.
    pub fn rows(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        if let Some(&token) = tokens.iter().find(|t| **t as usize >= self.vocab) {
            return Err(Error::Token { token, vocab: self.vocab });
        }
        match &self.table {
            Table::Plain(t) => {
                let ids = Tensor::new(tokens, &Device::Cpu)?;
                Ok(t.index_select(&ids, 0)?.flatten_all()?.to_vec1()?)
            }
            Table::Quantised(t) => {
                let data = t.data()?;
                let row = data.len() / self.vocab;
                let mut out = Vec::with_capacity(tokens.len() * self.hidden);
                for token in tokens {
                    let bytes = &data[*token as usize * row..][..row];
                    let one = qtensor_from_ggml(t.dtype(), bytes, vec![1, self.hidden], &Device::Cpu)?;
                    out.extend(one.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?);
                }
                Ok(out)
            }
        }
    }

    /// The same table as an output layer: tied weights are held once.
    pub fn as_matrix(&self) -> Result<Matrix> {
        Ok(Matrix(match &self.table {
            Table::Plain(t) => QMatMul::Tensor(t.clone()),
            Table::Quantised(t) => QMatMul::QTensor(t.clone()),
        }))
    }
}

/// Where weights come from.
pub enum Source {
    /// A GGUF file and its header.
    Gguf(Box<gguf_file::Content>, std::io::BufReader<std::fs::File>),
    /// One or several safetensors files.
    Safetensors(MmapedSafetensors),
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Source::Gguf(..) => "Source::Gguf",
            Source::Safetensors(_) => "Source::Safetensors",
        })
    }
}

impl Source {
    /// Maps safetensors files.
    pub fn safetensors(files: &[impl AsRef<Path>]) -> Result<Self> {
        // SAFETY: the mapping is read while the weights are copied out of it and dropped then. As with every mapped
        // file, someone who truncates it in that time stops the process with SIGBUS; nothing is written to it.
        Ok(Source::Safetensors(unsafe { MmapedSafetensors::multi(files)? }))
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Source::Gguf(content, _) => content.tensor_infos.contains_key(name),
            Source::Safetensors(files) => files.get(name).is_ok(),
        }
    }

    /// A matrix of `rows` outputs and `cols` inputs.
    pub fn matrix(&mut self, name: &str, rows: usize, cols: usize, precision: Precision) -> Result<Matrix> {
        let table = self.table(name, rows, cols, precision)?;
        Embedding { table, vocab: rows, hidden: cols }.as_matrix()
    }

    /// The table of embeddings.
    pub fn embedding(
        &mut self,
        name: &str,
        vocab: usize,
        hidden: usize,
        precision: Precision,
    ) -> Result<Embedding> {
        Ok(Embedding { table: self.table(name, vocab, hidden, precision)?, vocab, hidden })
    }

    /// A vector of `len` elements, as f32.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let tensor = match self {
            Source::Gguf(content, file) => {
                shape_is(name, gguf_shape(content, name)?, &[len])?;
                content.tensor(file, name, &Device::Cpu)?.dequantize(&Device::Cpu)?
            }
            Source::Safetensors(files) => {
                let tensor = load(files, name)?;
                shape_is(name, tensor.dims(), &[len])?;
                tensor
            }
        };
        Ok(tensor.to_vec1()?)
    }

    fn table(&mut self, name: &str, rows: usize, cols: usize, precision: Precision) -> Result<Table> {
        match self {
            Source::Gguf(content, file) => {
                shape_is(name, gguf_shape(content, name)?, &[rows, cols])?;
                let tensor = content.tensor(file, name, &Device::Cpu)?;
                let plain = matches!(tensor.dtype(), GgmlDType::F32 | GgmlDType::F16);
                Ok(if plain || precision == Precision::F32 {
                    Table::Plain(tensor.dequantize(&Device::Cpu)?)
                } else {
                    Table::Quantised(Arc::new(tensor))
                })
            }
            Source::Safetensors(files) => {
                let tensor = load(files, name)?;
                shape_is(name, tensor.dims(), &[rows, cols])?;
                // A q8_0 block is 32 values of one row.
                Ok(if precision == Precision::Q8 && cols % 32 == 0 {
                    Table::Quantised(Arc::new(QTensor::quantize(&tensor, GgmlDType::Q8_0)?))
                } else {
                    Table::Plain(tensor)
                })
            }
        }
    }
}

fn gguf_shape<'a>(content: &'a gguf_file::Content, name: &str) -> Result<&'a [usize]> {
    Ok(content.tensor_infos.get(name).ok_or_else(|| Error::NoTensor(name.into()))?.shape.dims())
}

fn load(files: &MmapedSafetensors, name: &str) -> Result<Tensor> {
    if files.get(name).is_err() {
        return Err(Error::NoTensor(name.into()));
    }
    Ok(files.load(name, &Device::Cpu)?.to_dtype(DType::F32)?)
}

fn shape_is(name: &str, found: &[usize], expected: &[usize]) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::TensorShape { name: name.into(), found: found.to_vec(), expected: expected.to_vec() })
}
