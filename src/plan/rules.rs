//! Which tensors are quantized: the tables of names, and what keeps a tensor dense.

/// A linear module by the end of its name, and the fused set it belongs to in the readers' own fused layers: they load
/// a set all quantized or all dense.
pub(super) struct Linear {
    pub suffix: &'static str,
    pub set: Option<&'static str>,
}

const fn linear(suffix: &'static str, set: Option<&'static str>) -> Linear {
    Linear { suffix, set }
}

/// Decoder linears that int4 quantizes: Spark's names, and those of Llama, Qwen, Mistral and Gemma, which end attention
/// in `o_proj`.
const LINEARS: &[Linear] = &[
    linear("self_attn.q_proj", Some("self_attn.q/k/v")),
    linear("self_attn.k_proj", Some("self_attn.q/k/v")),
    linear("self_attn.v_proj", Some("self_attn.q/k/v")),
    linear("self_attn.out_proj", None),
    linear("self_attn.o_proj", None),
    linear("mlp.gate_proj", Some("mlp.gate/up")),
    linear("mlp.up_proj", Some("mlp.gate/up")),
    linear("mlp.down_proj", None),
];

/// A projection stored whole that readers want in parts, cut along dim 0.
pub(super) struct Fused {
    pub suffix: &'static str,
    /// The last component of each part's name, in the order of the rows.
    pub parts: [&'static str; 3],
}

/// Spark's `[q | k | v]`.
pub(super) const FUSED: &[Fused] = &[Fused {
    suffix: "self_attn.q_k_v_proj",
    parts: ["q_proj", "k_proj", "v_proj"],
}];

/// What comes before `layers.N.` in a decoder. Vision towers, MTP heads and encoders are named otherwise and stay dense.
const DECODERS: &[&str] = &[
    "",
    "model.",
    "language_model.",
    "language_model.model.",
    "model.language_model.",
];

/// Modules that hold the token embedding, for `--quantize-embedding` and tied heads.
const EMBEDDINGS: &[&str] = &["embedding", "embed_tokens"];

pub(super) const HEAD: &str = "lm_head";

/// A module inside a decoder layer.
struct InLayer<'a> {
    /// `model.layers.3`
    layer: &'a str,
    index: usize,
    /// `self_attn.q_proj`
    rest: &'a str,
}

fn in_decoder_layer(module: &str) -> Option<InLayer<'_>> {
    DECODERS.iter().find_map(|decoder| {
        let rest = module.strip_prefix(decoder)?.strip_prefix("layers.")?;
        let (index, rest) = rest.split_once('.')?;
        let layer = &module[..module.len() - rest.len() - 1];
        Some(InLayer {
            layer,
            index: index.parse().ok()?,
            rest,
        })
    })
}

/// What int4's table says of a module.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Quantized; with the name of its fused set, which holds the layer's name.
    Quantize {
        set: Option<String>,
    },
    Dense {
        reason: String,
    },
}

/// `layers`: `num_hidden_layers` of config.json; a layer beyond it is a multi-token-prediction head.
pub(super) fn int4_verdict(module: &str, layers: Option<usize>) -> Verdict {
    let dense = |reason: &str| Verdict::Dense {
        reason: reason.to_string(),
    };
    let Some(at) = in_decoder_layer(module) else {
        let looks_like = LINEARS.iter().any(|linear| ends_with(module, linear.suffix));
        return if looks_like {
            dense("outside the decoder's layers")
        } else {
            dense("not a decoder linear")
        };
    };
    let fused = FUSED.iter().any(|fused| fused.suffix == at.rest);
    let Some(linear) = LINEARS.iter().find(|linear| linear.suffix == at.rest) else {
        // A fused projection that is kept whole is quantized as one module.
        return if fused {
            within(&at, layers, None)
        } else {
            dense("not a layer that is quantized")
        };
    };
    within(&at, layers, linear.set)
}

fn within(at: &InLayer, layers: Option<usize>, set: Option<&str>) -> Verdict {
    match layers {
        Some(layers) if at.index >= layers => Verdict::Dense {
            reason: format!(
                "layer {} is beyond num_hidden_layers {layers} (a prediction head)",
                at.index
            ),
        },
        _ => Verdict::Quantize {
            set: set.map(|set| format!("{}.{set}", at.layer)),
        },
    }
}

/// The table's entry for a fused projection inside a decoder layer.
pub(super) fn fused(module: &str) -> Option<&'static Fused> {
    let at = in_decoder_layer(module)?;
    FUSED.iter().find(|fused| fused.suffix == at.rest)
}

/// The fused projection that a module is a part of, and which.
pub(super) fn fused_by_part(module: &str) -> Option<(&'static Fused, usize)> {
    let at = in_decoder_layer(module)?;
    FUSED.iter().find_map(|fused| {
        let (parent, _) = fused.suffix.rsplit_once('.')?;
        let name = at.rest.strip_prefix(parent)?.strip_prefix('.')?;
        Some((fused, fused.parts.iter().position(|part| *part == name)?))
    })
}

/// Whether the module is the decoder's token embedding.
pub fn is_embedding(module: &str) -> bool {
    DECODERS.iter().any(|decoder| {
        module
            .strip_prefix(decoder)
            .is_some_and(|rest| EMBEDDINGS.contains(&rest))
    })
}

/// Linears of a decoder layer that no reader expects to be quantized: Spark's gate, one row a head, which its model code
/// builds dense.
const ALWAYS_DENSE: &[&str] = &["self_attn.g_proj"];

/// Whether a reader that knows the model takes this dense linear for dense without being told.
pub(super) fn is_always_dense(module: &str) -> bool {
    module == HEAD || in_decoder_layer(module).is_some_and(|at| ALWAYS_DENSE.contains(&at.rest))
}

/// Whether `module` is `suffix` or ends in `.suffix`.
fn ends_with(module: &str, suffix: &str) -> bool {
    module
        .strip_suffix(suffix)
        .is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(module: &str) -> Option<Option<String>> {
        match int4_verdict(module, Some(2)) {
            Verdict::Quantize { set } => Some(set),
            Verdict::Dense { .. } => None,
        }
    }

    #[test]
    fn decoder_linears_are_quantized_and_know_their_set() {
        assert_eq!(set("model.layers.1.self_attn.out_proj"), Some(None));
        assert_eq!(set("model.layers.1.self_attn.o_proj"), Some(None));
        assert_eq!(
            set("model.layers.1.mlp.up_proj"),
            Some(Some("model.layers.1.mlp.gate/up".into()))
        );
        assert_eq!(
            set("model.language_model.layers.0.self_attn.k_proj"),
            Some(Some("model.language_model.layers.0.self_attn.q/k/v".into()))
        );
        assert_eq!(set("model.layers.0.self_attn.q_k_v_proj"), Some(None));
    }

    #[test]
    fn towers_gates_and_prediction_heads_stay_dense() {
        for module in [
            "visual.blocks.0.mlp.gate_proj",
            "mtp.layers.0.self_attn.q_proj",
            "model.layers.2.self_attn.q_proj",
            "model.layers.0.self_attn.g_proj",
            "model.layers.0.mlp.experts.0.gate_proj",
            "model.layers.x.self_attn.q_proj",
            "model.norm",
        ] {
            assert_eq!(set(module), None, "{module}");
        }
    }

    #[test]
    fn embeddings_are_known_by_their_whole_name() {
        assert!(is_embedding("model.embedding") && is_embedding("model.embed_tokens"));
        assert!(!is_embedding("model.vision.embedding") && !is_embedding("model.layers.0.embedding"));
    }
}
