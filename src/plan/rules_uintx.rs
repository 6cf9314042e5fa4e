//! Which tensors uintN quantizes: every linear, as ai-toolkit does, less what a model family's own list excludes.

use crate::checkpoint::Checkpoint;
use serde_json::Value;

/// Tables that are looked up, not multiplied with, by the last component of their name. Linears called `x_embedder`,
/// `time_embed.0` and the like are none.
const EMBEDDINGS: &[&str] = &[
    "embed_positions",
    "embed_tokens",
    "embedding",
    "embedding_table",
    "embeddings",
    "pos_embed",
    "pos_embedding",
    "position_embedding",
    "position_embeddings",
    "relative_attention_bias",
    "shared",
    "tok_embeddings",
    "token_embedding",
    "token_embeddings",
    "token_type_embeddings",
    "word_embedding",
    "word_embeddings",
    "wpe",
    "wte",
];

/// What some releases put before every name.
const PREFIXES: &[&str] = &["model.diffusion_model.", "diffusion_model.", "transformer."];

/// A model family and the modules that ai-toolkit's list for it keeps dense.
#[derive(Debug)]
pub(super) struct Family {
    name: &'static str,
    /// `_class_name` in config.json.
    class: &'static str,
    /// Beginnings of names that together only this family has.
    signs: &'static [&'static str],
    /// Beginnings of names: the list's patterns less their final `*`.
    excluded: &'static [&'static str],
}

const FAMILIES: &[Family] = &[
    Family {
        name: "Wan 2.2",
        class: "WanTransformer3DModel",
        signs: &[
            "condition_embedder.time_embedder.",
            "blocks.0.attn1.",
            "blocks.0.attn2.",
        ],
        excluded: &["condition_embedder", "proj_out"],
    },
    Family {
        name: "Z-Image",
        class: "ZImageTransformer2DModel",
        signs: &["all_x_embedder.", "all_final_layer.", "cap_embedder."],
        excluded: &[
            "t_embedder",
            "cap_embedder",
            "all_x_embedder",
            "all_final_layer",
            "siglip_embedder",
        ],
    },
];

impl Family {
    /// By config.json's `_class_name`; without one, by names.
    pub fn of(source: &Checkpoint) -> Option<&'static Family> {
        let class = source.config.as_ref().and_then(|config| config.get("_class_name"));
        if let Some(Value::String(class)) = class {
            return FAMILIES.iter().find(|family| family.class == class);
        }
        let has = |sign: &&str| {
            source
                .tensors
                .iter()
                .any(|tensor| bare(&tensor.name).starts_with(*sign))
        };
        FAMILIES.iter().find(|family| family.signs.iter().all(has))
    }
}

/// A name without what a release puts before all of them.
pub(super) fn bare(name: &str) -> &str {
    let stripped = PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix));
    stripped.unwrap_or(name)
}

/// Why a module with a 2-D weight stays dense, or nothing.
pub(super) fn uintx_refuses(module: &str, family: Option<&Family>) -> Option<String> {
    let last = module.rsplit('.').next().unwrap_or(module);
    if EMBEDDINGS.contains(&last) {
        return Some("an embedding table".to_string());
    }
    if last.trim_end_matches(|c: char| c.is_ascii_digit()).ends_with("norm") {
        return Some("a norm".to_string());
    }
    let family = family?;
    let start = family.excluded.iter().find(|start| bare(module).starts_with(*start))?;
    Some(format!("{}'s exclude list: {start}*", family.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_and_norms_stay_dense_and_linears_that_embed_do_not() {
        for module in [
            "model.embed_tokens",
            "wte",
            "shared",
            "y_embedder.embedding_table",
            "norm1",
            "q_layernorm",
        ] {
            assert!(uintx_refuses(module, None).is_some(), "{module}");
        }
        for module in [
            "x_embedder",
            "context_embedder",
            "time_embed.0",
            "time_text_embed.timestep_embedder.linear_1",
            "norm1.linear",
            "text_embedding.0",
            "proj_out",
            "lm_head",
        ] {
            assert_eq!(uintx_refuses(module, None), None, "{module}");
        }
    }

    #[test]
    fn a_familys_list_is_named_in_the_reason() {
        let reason = |module| uintx_refuses(module, Some(&FAMILIES[0]));
        let wan = "Wan 2.2's exclude list: condition_embedder*";
        assert_eq!(reason("condition_embedder.time_proj").unwrap(), wan);
        assert_eq!(reason("diffusion_model.condition_embedder.time_proj").unwrap(), wan);
        assert_eq!(reason("blocks.0.attn1.to_q"), None);
    }
}
